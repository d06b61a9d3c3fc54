"""In plain data: what identifies a call that an attached process makes itself, and a group as it is told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.group.call_queue import CallQueue, GroupState
from rankmesh_agent.group.delegation import CallReport
from rankmesh_agent.group.flight_recorder import OpStats, Record
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE, code_of
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp
from rankmesh_agent.wire.schemas import MOST_IN_FLIGHT

_MOST_ERROR = 1000
"""Characters of an error that are told."""


def call_told(call: Call) -> list[Any]:
    """Return a call as plain data."""
    dtype = NONE if call.dtype is None else code_of(call.dtype)
    return [int(call.kind), dtype, call.count, call.reduce_op, call.root, call.counts, call.subject]


def call_heard(said: Any) -> Call:
    """Return the call that plain data describes.

    Raises:
        ProtocolError: it describes none.
    """
    try:
        kind, dtype, count, op, root, counts, subject = said
        return Call(
            OpType(kind),
            FROM_CODE[dtype] if dtype != NONE else None,
            int(count),
            None if op is None else ReduceOp(op),
            None if root is None else int(root),
            None if counts is None else tuple(map(int, counts)),
            str(subject),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"an attached process described a call that there is not: {said!r:.200}") from error


def told(order: CallQueue, standing: GroupState, ended: Sequence[Record]) -> list[Any] | None:
    """Return what there is to tell of a group's calls as plain data, None if there was no call.

    Args:
        order: the group's calls.
        standing: of the group.
        ended: its calls that have ended since.
    """
    under_way = [entry for entry in order.active_records() if isinstance(entry[1], Call)][:MOST_IN_FLIGHT]
    latest = under_way[0] if under_way else ended[-1] if ended else None
    if latest is None or not isinstance(latest[1], Call):
        return None
    return [
        call_told(latest[1]),
        standing.seq,
        {op: [each.nbytes, each.seconds, each.failures, each.buckets] for op, each in order.op_stats().items()},
        [[call_told(call), seq, begun, nbytes] for _, call, seq, begun, _, _, nbytes in _calls(under_way)],
        [
            [call_told(call), seq, begun, end, error[:_MOST_ERROR], nbytes]
            for _, call, seq, begun, end, error, nbytes in _calls(ended)
        ],
    ]


def _calls(entries: Sequence[Record]) -> Iterator[tuple[Any, Call, int, float, float | None, str, int]]:
    for owner, call, seq, begun, end, error, nbytes in entries:
        if isinstance(call, Call):
            yield owner, call, seq, begun, end, error, nbytes


def told_heard(said: Any) -> CallReport:
    """Return what was told of a group's calls.

    Raises:
        ProtocolError: nothing that one can understand.
    """
    try:
        latest, seq, tallies, under_way, ended = said
        return CallReport(
            call_heard(latest),
            int(seq),
            {str(op): _tally(*each) for op, each in tallies.items()},
            [(call_heard(call), int(number), float(begun), int(nbytes)) for call, number, begun, nbytes in under_way],
            [
                (call_heard(call), int(number), float(begun), float(end), str(error), int(nbytes))
                for call, number, begun, end, error, nbytes in ended
            ],
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolError("an attached process told of calls what cannot be understood") from error


def _tally(nbytes: int, seconds: float, failures: int, buckets: list[int]) -> OpStats:
    found = OpStats()
    found.nbytes, found.seconds, found.failures = int(nbytes), float(seconds), int(failures)
    if len(buckets) != len(found.buckets):
        raise ProtocolError("an attached process has other buckets for the calls' durations")
    found.buckets = [int(count) for count in buckets]
    return found


class LentMemory(NamedTuple):
    """The members' memory, which the attached process is to use.

    Attributes:
        size: bytes of the memory.
        slot_bytes: bytes of a slot.
        crowded: see Segment.
    """

    size: int
    slot_bytes: int
    crowded: bool


class GroupTold(NamedTuple):
    """A group, as the agent tells of it.

    Attributes:
        id, name, ranks, timeout, medium: see Calls.
        lent: the members' memory, None where the agent makes the calls; its descriptor comes along.
    """

    id: int
    name: str
    ranks: list[int]
    timeout: float
    medium: str
    lent: LentMemory | None

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return self._asdict() | {"lent": None if self.lent is None else list(self.lent)}


def group_told(group: LocalCommunicator) -> tuple[GroupTold, list[int]]:
    """Return a group in words, and the descriptors that go along."""
    segment = group.lent
    lent, descriptors = None, []
    if segment is not None:
        lent = LentMemory(segment.mapping.bytes.size, segment.slot_bytes, segment.oversubscribed)
        descriptors = [segment.mapping.descriptor]
    return GroupTold(group.id, group.name, list(group.ranks), group.timeout, group.medium, lent), descriptors


def group_heard(said: dict[str, Any]) -> GroupTold:
    """Return what was told of a group.

    Raises:
        ProtocolError: nothing that one can understand.
    """
    try:
        lent = said["lent"]
        return GroupTold(**{**said, "lent": None if lent is None else LentMemory(*lent)})
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"the agent described a group that there is not: {said!r:.200}") from error


def dtype_heard(code: int) -> np.dtype[Any]:
    """Return an element type by its code.

    Raises:
        ProtocolError: there is none of that code.
    """
    found = FROM_CODE.get(code)
    if found is None:
        raise ProtocolError(f"there is no element type {code}")
    return found
