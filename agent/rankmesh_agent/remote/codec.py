"""Plain-data forms of errors, calls, call reports and group descriptions, for agents and attached processes."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.agent import Agent
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.delegation import CallReport
from rankmesh_agent.group.flight_recorder import Record
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE, code_of
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError, from_code
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp
from rankmesh_agent.wire.schemas import MAX_IN_FLIGHT
from rankmesh_agent.wire.stats import BOUNDS, OpStats

_BUILTIN_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, RuntimeError, IndexError, OverflowError, MemoryError, NotImplementedError)
}
_MAX_ERROR_CHARACTERS = 1000
"""Of an error text in a call report."""


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data."""
    if isinstance(error, DistError):
        return {**error.details(), "code": error.code, "message": error.message}
    return {"type": type(error).__name__, "message": str(error)}


def error_from_json(document: dict[str, Any], *, at_agent: bool = False) -> BaseException:
    """Return the error that a document describes.

    Args:
        document: what ``error_to_json`` returned at the other end.
        at_agent: this process is the agent: errors of unknown types keep their names, which the other ranks report.
    """
    details = dict(document)
    message = str(details.pop("message", ""))
    if "code" in details:
        return from_code(str(details.pop("code")), message, **details)
    name = str(details.get("type", ""))
    if name in _BUILTIN_ERRORS:
        return _BUILTIN_ERRORS[name](message)
    if at_agent:
        kind: type[Exception] = type(name if name.isidentifier() else "Exception", (Exception,), {})
        return kind(message)
    return DistBackendError(f"the agent could not carry the call out: {name}: {message}")


def call_to_json(call: Call) -> list[Any]:
    """Return a call as plain data."""
    dtype = NONE if call.dtype is None else code_of(call.dtype)
    return [int(call.kind), dtype, call.count, call.reduce_op, call.root, call.counts, call.subject]


def call_from_json(document: Any) -> Call:
    """Return the call that a document describes.

    Raises:
        ProtocolError: it describes none.
    """
    try:
        kind, dtype, count, op, root, counts, subject = document
        return Call(
            OpType(kind),
            FROM_CODE[dtype] if dtype != NONE else None,
            int(count),
            None if op is None else ReduceOp(op),
            None if root is None else int(root),
            None if counts is None else tuple(map(int, counts)),
            str(subject),
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ProtocolError(f"an attached process described an unknown call: {repr(document):.200}") from error


def report_to_json(queue: CallQueue, state: GroupState, ended: Sequence[Record]) -> list[Any] | None:
    """Return a report of a group's calls as plain data, None if there is nothing to report.

    Args:
        queue: the group's calls.
        state: of the group.
        ended: its calls that have ended since the last report.
    """
    in_flight = [entry for entry in queue.active_records() if isinstance(entry[1], Call)][:MAX_IN_FLIGHT]
    latest = in_flight[0] if in_flight else ended[-1] if ended else None
    if latest is None or not isinstance(latest[1], Call):
        return None
    return [
        call_to_json(latest[1]),
        state.seq,
        {op: [each.nbytes, each.seconds, each.failures, each.buckets] for op, each in queue.op_stats().items()},
        [
            [call_to_json(call), seq, begun, nbytes]
            for _, call, seq, begun, _, _, nbytes in in_flight
            if isinstance(call, Call)
        ],
        [
            [call_to_json(call), seq, begun, end, error[:_MAX_ERROR_CHARACTERS], nbytes]
            for _, call, seq, begun, end, error, nbytes in ended
            if isinstance(call, Call)
        ],
    ]


def report_from_json(document: Any) -> CallReport:
    """Return the call report that a document describes.

    Raises:
        ProtocolError: it describes none.
    """
    try:
        latest, seq, tallies, in_flight, ended = document
        return CallReport(
            call_from_json(latest),
            int(seq),
            {str(op): _op_stats(*each) for op, each in tallies.items()},
            [
                (call_from_json(call), int(number), float(begun), int(nbytes))
                for call, number, begun, nbytes in in_flight
            ],
            [
                (call_from_json(call), int(number), float(begun), float(end), str(error), int(nbytes))
                for call, number, begun, end, error, nbytes in ended
            ],
        )
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ProtocolError("an attached process sent a malformed report of its calls") from error


def _op_stats(nbytes: int, seconds: float, failures: int, buckets: list[int]) -> OpStats:
    if len(buckets) != len(BOUNDS) + 1:
        raise ProtocolError("an attached process has other buckets for the calls' durations")
    return OpStats(int(nbytes), float(seconds), int(failures), [int(count) for count in buckets])


class GroupDescription(NamedTuple):
    """A group, as the agent describes it to the attached process; as plain data, a dict of these fields.

    Attributes:
        id, name, ranks, timeout, medium: see Communicator.
        lent: the members' shared memory for the attached process to map: its bytes, bytes of a slot, and whether the
            host is oversubscribed; its descriptor comes along. None where the agent makes the calls.
    """

    id: int
    name: str
    ranks: list[int]
    timeout: float
    medium: str
    lent: tuple[int, int, bool] | None


def describe_agent(agent: Agent) -> tuple[dict[str, Any], list[int]]:
    """Return the description of an agent that has joined its job as plain data, and the descriptors that go along."""
    world, descriptors = describe_group(agent.world)
    members = [vars(member) for member in agent.members()]
    return {"rank": agent.member.rank, "members": members, "world": world}, descriptors


def describe_group(group: LocalCommunicator) -> tuple[dict[str, Any], list[int]]:
    """Return the description of a group as plain data, and the descriptors that go along."""
    backend = group.queue.backend
    segment = backend.segment if backend.delegated else None
    lent, descriptors = None, []
    if segment is not None:
        lent = segment.mapping.bytes.size, segment.slot_bytes, segment.oversubscribed
        descriptors = [segment.mapping.descriptor]
    description = GroupDescription(group.id, group.name, list(group.ranks), group.timeout, group.medium, lent)
    return description._asdict(), descriptors


def group_from_json(document: dict[str, Any]) -> GroupDescription:
    """Return the group description in a document.

    Raises:
        ProtocolError: there is none.
    """
    try:
        return GroupDescription(**document)
    except TypeError as error:
        raise ProtocolError(f"the agent sent a malformed description of a group: {repr(document):.200}") from error


def dtype_from_code(code: int) -> np.dtype[Any]:
    """Return an element type by its code.

    Raises:
        ProtocolError: there is none of that code.
    """
    found = FROM_CODE.get(code)
    if found is None:
        raise ProtocolError(f"there is no element type {code}")
    return found
