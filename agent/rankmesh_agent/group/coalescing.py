"""A batch of collectives: recorded while it is open, then made in one go, small all_reduces together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rankmesh_agent.group.pending import Details, OnComplete
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.wire.ops import OpType


class RecordedCall(NamedTuple):
    """A call that is to be made when the batch ends.

    Attributes:
        key: the fields of its Call, equal at all ranks.
        arguments: what the algorithm takes.
        user: the user's arrays.
        after: what to do once the data is there.
        note: what to say of it when the ranks' calls do not fit together.
    """

    key: tuple[Any, ...]
    arguments: Sequence[Any]
    result: list[Any]
    on_complete: OnComplete
    details: Details = None


class BatchedWork(Work):
    """What an asynchronous call in a batch returns: it is the batch that one waits for."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError("this call is part of a batch: wait for the batch, not for its calls")

    def is_completed(self) -> bool:
        self._refuse()

    def exception(self) -> BaseException | None:
        self._refuse()

    def wait(self, timeout: Any = None) -> bool:
        self._refuse()

    def result(self) -> list[Any]:
        self._refuse()

    def get_future(self) -> Future:
        self._refuse()


def coalesce(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls with neighbouring all_reduces of one dtype and operation made one, unless they share memory."""
    found: list[list[RecordedCall]] = []
    for call in calls:
        if found and _alike(call.key, found[-1][-1].key):
            found[-1].append(call)
        else:
            found.append([call])
    return [call for run in found for call in ([_one(run)] if len(run) > 1 and _disjoint(run) else run)]


def _alike(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return key[0] is OpType.ALL_REDUCE and (key[:2], key[3:]) == (other[:2], other[3:])


def _disjoint(run: Sequence[RecordedCall]) -> bool:
    arrays = [call.arguments[0] for call in run]
    spans = sorted((array.__array_interface__["data"][0], array.nbytes) for array in arrays if array.size)
    return all(begin + nbytes <= following for (begin, nbytes), (following, _) in itertools.pairwise(spans))


def _one(calls: list[RecordedCall]) -> RecordedCall:
    """Return one all_reduce of the arrays behind one another."""
    kind, dtype, _, op = calls[0].key
    arrays = [call.arguments[0] for call in calls]
    together = np.concatenate(arrays)

    def apart() -> None:
        begin = 0
        for call, array in zip(calls, arrays, strict=True):
            array[:] = together[begin : begin + array.size]
            begin += array.size
            if call.on_complete is not None:
                call.on_complete()

    user = [array for call in calls for array in call.result]
    # Ranks that split the same number of elements otherwise are to notice.
    split = f"arrays of {'+'.join(str(array.size) for array in arrays)}"
    notes = [call.details for call in calls if call.details is not None]
    note = (lambda: "; ".join(one() for one in notes)) if notes else None
    return RecordedCall((kind, dtype, together.size, op, None, None, split), (together, op), user, apart, note)
