"""Documents between agents and attached processes, and errors as plain data in them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import msgpack

from rankmesh_agent.agent import Agent
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError, from_document
from rankmesh_agent.wire.schemas import Member

T = TypeVar("T")
ErrorData = dict[str, Any]

_BUILTIN_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, RuntimeError, IndexError, OverflowError, MemoryError, NotImplementedError)
}


def error_data(error: BaseException) -> ErrorData:
    """Return an error as plain data."""
    if isinstance(error, DistError):
        return error.document()
    return {"type": type(error).__name__, "message": str(error)}


def error_from(data: ErrorData, *, at_agent: bool = False) -> BaseException:
    """Return the error that ``error_data`` has described at the other end.

    At the agent, errors of unknown types keep their names, which the other ranks report.
    """
    if "code" in data:
        return from_document(data)
    name, message = str(data.get("type", "")), str(data.get("message", ""))
    if name in _BUILTIN_ERRORS:
        return _BUILTIN_ERRORS[name](message)
    if at_agent:
        kind: type[Exception] = type(name if name.isidentifier() else "Exception", (Exception,), {})
        return kind(message)
    return DistBackendError(f"the agent could not carry the call out: {name}: {message}")


def encode(document: Any) -> bytes:
    """Return a request or a result as a document."""
    try:
        return msgpack.encode(document)
    except UnicodeEncodeError:  # a lone surrogate, as in a file's name
        text = json.dumps(msgspec.to_builtins(document), ensure_ascii=False)
        return msgpack.encode(json.loads(text.encode(errors="replace")))


def decode(decoder: msgpack.Decoder[T], document: bytes | bytearray) -> T:
    """Return what a document has; raise ProtocolError if that is something else."""
    try:
        return decoder.decode(document)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"an attached process, or its agent, sent a malformed document: {error}") from error


class GroupDescription(NamedTuple):
    """A group, as the agent describes it to the attached process; see Communicator."""

    id: int
    name: str
    ranks: list[int]
    timeout: float
    medium: str

    @classmethod
    def of(cls, group: LocalCommunicator) -> GroupDescription:
        return cls(group.id, group.name, list(group.ranks), group.timeout, group.medium)


class Joined(NamedTuple):
    """A rank of a job that an agent has joined: the lease's id, the rank, all members, and the group of all ranks."""

    lease: str
    rank: int
    members: list[Member]
    world: GroupDescription

    @classmethod
    def of(cls, agent: Agent, lease: str = "") -> Joined:
        return cls(
            lease,
            agent.member.rank,
            [member for _, member in sorted(agent.members.items())],
            GroupDescription.of(agent.world),
        )
