"""Recorder of the collectives of a batch, which are made when it ends.

Neighbouring all_reduces of one dtype and operation become one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import OpType


class RecordedCall(NamedTuple):
    """A call that is executed when the batch ends.

    Attributes:
        key: the fields of its Call, equal at all ranks.
        arguments: the algorithm's.
        options: its own: the batch has the timeout.
    """

    key: tuple[Any, ...]
    arguments: Sequence[Any]
    options: Options


class BatchedWork(Work):
    """Work of an asynchronous call in a batch; the caller waits for the batch instead."""

    message = None
    __repr__ = object.__repr__

    def __init__(self) -> None:
        pass

    @property
    def _future(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("this call is part of a batch: wait for the batch, not for its calls")


class CallRecorder:
    """Records a thread's collectives of a group, instead of executing them, until ``close``.

    Args:
        comm: the group's communicator.

    Raises:
        RuntimeError: a batch of the group is open.
    """

    def __init__(self, comm: Communicator) -> None:
        if comm.batch is not None:
            raise RuntimeError(f"a batch is already open for group {comm.name!r}; batches of a group do not nest")
        self._comm = comm
        self._execute, self._at_once = comm.submit, comm.at_once
        self._thread = threading.current_thread()
        self._calls: list[RecordedCall] = []
        comm.batch, comm.submit, comm.at_once = self, self._submit, None

    def _submit(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> Work | None:
        """See CallQueue.submit; calls of other threads are executed."""
        if threading.current_thread() is not self._thread:
            return self._execute(key, arguments, options)
        self._comm.queue.plan(key)  # refuses a reduction that is not defined for the dtype
        self._calls.append(RecordedCall(key, arguments, options))
        return BatchedWork() if options.async_op else None

    def close(self, options: Options | None) -> list[Work]:
        """Execute the recorded calls, or with None drop them; return the Works of asynchronous ones."""
        self._comm.batch, self._comm.submit, self._comm.at_once = None, self._execute, self._at_once
        if options is None:
            return []
        works = []
        for key, arguments, given in coalesce(self._calls):
            given = given._replace(timeout=options.timeout, async_op=options.async_op)
            works.append(self._execute(key, arguments, given))
        return [work for work in works if work is not None]


def is_recording(comm: Communicator) -> bool:
    """Return whether this thread's collectives of a group are being recorded."""
    return isinstance(comm.batch, CallRecorder) and comm.batch._thread is threading.current_thread()


def coalesce(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls, neighbouring all_reduces of one dtype and operation as one, unless their arrays overlap."""
    found: list[list[RecordedCall]] = []
    for call in calls:
        if found and _same_operation(call.key, found[-1][-1].key):
            found[-1].append(call)
        else:
            found.append([call])
    return [call for run in found for call in ([_one(run)] if len(run) > 1 and _disjoint(run) else run)]


def _same_operation(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return key[0] is OpType.ALL_REDUCE and (key[:2], key[3:]) == (other[:2], other[3:])


def _disjoint(run: Sequence[RecordedCall]) -> bool:
    arrays = [call.arguments[0] for call in run]
    spans = sorted((array.__array_interface__["data"][0], array.nbytes) for array in arrays if array.size)
    return all(begin + nbytes <= following for (begin, nbytes), (following, _) in itertools.pairwise(spans))


def _one(calls: list[RecordedCall]) -> RecordedCall:
    """Return one all_reduce of the concatenated arrays."""
    kind, dtype, _, op = calls[0].key[:4]
    arrays = [call.arguments[0] for call in calls]
    joined = np.concatenate(arrays)

    def split_back() -> None:
        begin = 0
        for call, array in zip(calls, arrays, strict=True):
            array[:] = joined[begin : begin + array.size]
            begin += array.size
            if call.options.on_complete is not None:
                call.options.on_complete()

    result = [array for call in calls for array in call.options.result]
    # Part of the call's identity: a rank that splits the same number of elements otherwise makes another call.
    split = f"arrays of {'+'.join(str(array.size) for array in arrays)}"
    each = [call.options.details for call in calls if call.options.details is not None]
    details = (lambda: "; ".join(one() for one in each)) if each else None
    options = calls[0].options._replace(result=result, on_complete=split_back, details=details)
    return RecordedCall((kind, dtype, joined.size, op, None, None, split), (joined, op), options)
