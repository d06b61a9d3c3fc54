"""In plain data: what identifies a call that an attached process makes itself, and a group as it is told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.engine.communicator import Communicator
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE, code_of
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.ops import Call, Kind, ReduceOp


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
            Kind(kind),
            FROM_CODE[dtype] if dtype != NONE else None,
            int(count),
            None if op is None else ReduceOp(op),
            None if root is None else int(root),
            None if counts is None else tuple(map(int, counts)),
            str(subject),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"an attached process described a call that there is not: {said!r:.200}") from error


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


def group_told(group: Communicator) -> tuple[GroupTold, list[int]]:
    """Return a group in words, and the descriptors that go along."""
    segment = group.lent
    lent, descriptors = None, []
    if segment is not None:
        lent = LentMemory(segment.mapping.bytes.size, segment.slot_bytes, segment.crowded)
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
