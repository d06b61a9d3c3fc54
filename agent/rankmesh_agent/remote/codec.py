"""Plain-data forms of errors, calls and group descriptions, for agents and attached processes."""

from __future__ import annotations

from reprlib import repr
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.agent import Agent
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE, code_of
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError, from_code
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

_BUILTIN_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, RuntimeError, IndexError, OverflowError, MemoryError, NotImplementedError)
}


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


def key_from_json(document: Any) -> tuple[Any, ...]:
    """Return the key (see CallQueue.submit) of the call that a document describes.

    Raises:
        ProtocolError: it describes none.
    """
    try:
        kind, dtype, count, op, root, counts, subject = document
        return (
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


class GroupDescription(NamedTuple):
    """A group, as the agent describes it to the attached process; as plain data, a dict of these fields.

    Attributes:
        id, name, ranks, timeout, medium: see Communicator.
    """

    id: int
    name: str
    ranks: list[int]
    timeout: float
    medium: str


def describe_agent(agent: Agent) -> dict[str, Any]:
    """Return the description of an agent that has joined its job as plain data."""
    members = [vars(member) for member in agent.members()]
    return {"rank": agent.member.rank, "members": members, "world": describe_group(agent.world)}


def describe_group(group: LocalCommunicator) -> dict[str, Any]:
    """Return the description of a group as plain data."""
    return GroupDescription(group.id, group.name, list(group.ranks), group.timeout, group.medium)._asdict()


def dtype_from_code(code: int) -> np.dtype[Any]:
    """Return an element type by its code.

    Raises:
        ProtocolError: there is none of that code.
    """
    found = FROM_CODE.get(code)
    if found is None:
        raise ProtocolError(f"there is no element type {code}")
    return found
