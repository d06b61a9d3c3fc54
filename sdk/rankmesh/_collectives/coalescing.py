"""Coalescing: batches of collectives that are recorded, and made together when the batch ends.

Neighbouring all_reduces of one dtype and operation become one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rankmesh._collectives.arguments import Timeout, check_list, communicator, options
from rankmesh._collectives.gather import all_gather
from rankmesh._collectives.reduce import all_reduce
from rankmesh._session.process_group import Group, NonMember
from rankmesh._session.session import communicator_of
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import OpType, PremulSum, ReduceOp


class Batch:
    """The Works of the collectives in a ``batch()`` that has ended.

    Attributes:
        works: one per collective; empty if they were synchronous.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self, timeout: Timeout = None) -> None:
        """Wait for all collectives of an asynchronous batch.

        Args:
            timeout: limit for each, timedelta or seconds; the operation's own by default.

        Raises:
            DistError: one of them failed.
        """
        for work in self.works:
            work.wait(timeout)


@contextlib.contextmanager
def batch(group: Group = None, async_ops: bool = False, *, timeout: Timeout = None) -> Iterator[Batch]:
    """Make the collectives called in the block together when it ends; consecutive all_reduces become one.

    The arrays must not be used before, and no call may depend on the result of another: some arrays are copied when
    their collective is called. An error in the block discards its collectives: none is made.

    Args:
        group: the group whose collectives are batched, the world by default. Those of other groups, point-to-point
            messages, and calls of other threads are made immediately.
        async_ops: do not wait at the end of the block; ``wait()`` of the Batch waits.
        timeout: limit for each, timedelta or seconds; the group's by default.

    Raises:
        RuntimeError: a batch of this group is open.

    Source: torch.distributed's coalescing manager
    """
    batched = Batch()
    if isinstance(group, NonMember):
        yield batched  # each of its collectives warns
        return
    comm = communicator_of(group)
    call_options = options(comm, timeout, async_ops, [])
    recorder = CallRecorder(comm)
    try:
        yield batched
    except BaseException:
        recorder.close(None)
        raise
    batched.works = recorder.close(call_options)


def _coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> contextlib.AbstractContextManager[Batch]:
    """Return ``batch(group, async_ops)``; ``device`` is accepted for compatibility with torch."""
    return batch(group, async_ops)


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Batch | None:
    """Reduce several arrays over all ranks, in place, together.

    Args:
        tensors: list of arrays as for all_reduce, the same on all ranks.

    The other arguments, and the result, are those of all_reduce, with a Batch in the place of a Work.

    Raises:
        TypeError: ``tensors`` is not a list.
        Exception: as for all_reduce.
    """
    if communicator(group, "all_reduce_coalesced") is None:
        return None
    check_list(tensors, "tensors")
    with batch(group, async_op, timeout=timeout) as batched:
        for tensor in tensors:
            all_reduce(tensor, op, group)
    return batched if async_op else None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Batch | None:
    """Gather several arrays from all ranks.

    Args:
        output_tensor_lists: by group rank, that rank's arrays.
        input_tensor_list: this rank's arrays.

    The other arguments, and the result, are those of all_reduce, with a Batch in the place of a Work.

    Raises:
        TypeError: an argument is not a list.
        ValueError: there is not one list of outputs a rank, or one has another length than the inputs.
        Exception: as for all_gather.
    """
    comm = communicator(group, "all_gather_coalesced")
    if comm is None:
        return None
    check_list(input_tensor_list, "input_tensor_list")
    check_list(output_tensor_lists, "output_tensor_lists", comm.size, "lists")
    for number, outputs in enumerate(output_tensor_lists):
        check_list(outputs, f"output_tensor_lists[{number}]")
        if len(outputs) != len(input_tensor_list):
            raise ValueError(
                f"output_tensor_lists[{number}] has {len(outputs)} arrays, input_tensor_list {len(input_tensor_list)}: "
                "each rank has the same number of arrays"
            )
    with batch(group, async_op, timeout=timeout) as batched:
        for number, tensor in enumerate(input_tensor_list):
            all_gather([outputs[number] for outputs in output_tensor_lists], tensor, group)
    return batched if async_op else None


# The record of a batch


class RecordedCall(NamedTuple):
    """A call that is executed when the batch ends; ``key``: the fields of its Call, equal at all ranks."""

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
    """Records a thread's collectives of a group, instead of executing them, until ``close``."""

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
    runs = [[*run] for _, run in itertools.groupby(calls, _operation)]
    return [call for run in runs for call in ([_one(run)] if len(run) > 1 and _disjoint(run) else run)]


def _operation(call: RecordedCall) -> object:
    """Return what calls that can be one have in common."""
    return (call.key[:2], call.key[3:]) if call.key[0] is OpType.ALL_REDUCE else id(call)


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
