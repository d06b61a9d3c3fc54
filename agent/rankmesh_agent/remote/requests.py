"""Requests of an attached process to its agent: a class for each, with its fields, its result and its execution.

A request, and its result, is the document of a frame (wire.attach_frames) in MessagePack, which has all float numbers.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta, msgpack

from rankmesh_agent.remote.codec import ErrorData, GroupDescription, Joined, error_data, error_from
from rankmesh_agent.remote.session import Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.store import codec, commands
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.wire import goodbye
from rankmesh_agent.wire.errors import DistError, ProtocolError
from rankmesh_agent.wire.schemas import LeaseTerms

R = TypeVar("R")
Seconds = Annotated[float, Meta(ge=0)]
Length = Annotated[int, Meta(ge=0)]
"""Elements of an array."""


class Request(msgspec.Struct, Generic[R], tag=True):
    """A request whose result is an R."""

    def execute(self, session: Session, stream: AgentStream) -> R:
        """Execute the request at the agent, with the arrays of the stream that has brought it; return its result."""
        raise ProtocolError(f"an attached process sent a {type(self).__name__} where there is none")

    @classmethod
    @functools.cache
    def results(cls) -> msgpack.Decoder[R]:
        """Return the decoder of the results."""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        return msgpack.Decoder(get_args(base)[0])


# The lease: requests on its connection


class Acquire(Request[Joined]):
    """Lease the agent, and have it join the job."""

    terms: LeaseTerms


class Release(Request[None]):
    """End the lease; see Agent.close for the fields."""

    reason: str
    raised: bool
    exit_text: str
    place: str = ""


# Groups


class NewGroup(Request[GroupDescription]):
    """Make a group; see Agent.new_group."""

    ranks: list[int]
    timeout: Seconds
    global_ranks: list[int]

    def execute(self, session: Session, stream: AgentStream) -> GroupDescription:
        group = session.agent.new_group(self.ranks, self.timeout, self.global_ranks)
        session.groups[group.id] = group
        return GroupDescription.of(group)


class DropGroup(Request[None]):
    """End a group at this rank; ``how`` is an encoded Goodbye, if it needs one."""

    group: int
    how: bytes | None

    def execute(self, session: Session, stream: AgentStream) -> None:
        how = None if self.how is None else goodbye.decode(self.how)
        session.agent.drop_group(session.drop(self.group), how)


class SetGlobalRanks(Request[None]):
    """Change the ranks by which errors name the members; those of the world, if it has shrunk to this group."""

    group: int
    global_ranks: list[int]
    world: bool

    def execute(self, session: Session, stream: AgentStream) -> None:
        if self.world:
            session.agent.set_world(session.group(self.group))
        else:
            session.group(self.group).set_global_ranks(tuple(self.global_ranks))


class SetTimeout(Request[None]):
    """Change the default timeout of a group's calls."""

    group: int
    timeout: Seconds

    def execute(self, session: Session, stream: AgentStream) -> None:
        session.group(self.group).set_timeout(self.timeout)


# The store


class StoreCommand(Request[bytes]):
    """Execute a command of the job's store; command and result are frames of its protocol."""

    frame: bytes

    def execute(self, session: Session, stream: AgentStream) -> bytes:
        return codec.serve(self.frame, functools.partial(_execute_command, session.agent.store, stream))


def _execute_command(store: StoreClient, stream: AgentStream, request: codec.Request) -> Any:
    command, result = request.command, store.execute(request.command, request.timeout)
    if isinstance(command, commands.QueuePop) and stream.peer_closed():  # the value goes back to the queue
        store.undo(command, result)
    return result


# Failures


class Abort(Request[ErrorData | None]):
    """End a group because of an error at the client, without one those that are being made; return the failure."""

    error: ErrorData
    group: int | None = None

    def execute(self, session: Session, stream: AgentStream) -> ErrorData | None:
        error = error_from(self.error, at_agent=True)
        if self.group is None:
            session.agent.group_registry.abort_pending(error)
            return None
        state = session.group(self.group).state
        state.abort(error)
        return None if state.failure is None else error_data(state.failure)


class Failure(Request[ErrorData | None]):
    """Return the failure of a group, or the first one that names one of some ranks."""

    group: int | None = None
    naming: list[int] | None = None

    def execute(self, session: Session, stream: AgentStream) -> ErrorData | None:
        failure: DistError | None = session.ended()
        if failure is None and self.group is not None:
            failure = session.group(self.group).failure
        elif failure is None and self.naming is not None:
            failure = session.agent.failure_naming(self.naming)
        return None if failure is None else error_data(failure)


class FailedRanks(Request[list[int]]):
    """Return the other ranks that the first failure names."""

    def execute(self, session: Session, stream: AgentStream) -> list[int]:
        return session.agent.failed_ranks


class LostRanks(Request[list[ErrorData]]):
    """Return the errors of the ranks that have failed since the last such request."""

    def execute(self, session: Session, stream: AgentStream) -> list[ErrorData]:
        return [error_data(session.lost.popleft()) for _ in range(len(session.lost))]


class RecordFailure(Request[None]):
    """Record an error that ends the client's process, before the lease ends."""

    group: int
    error: ErrorData

    def execute(self, session: Session, stream: AgentStream) -> None:
        error = error_from(self.error, at_agent=True)
        if isinstance(error, DistError):
            session.agent.record_failure(session.group(self.group), error)


# Growth


class NumWaiting(Request[int]):
    """Return how many processes wait for the world to grow."""

    seconds: Seconds

    def execute(self, session: Session, stream: AgentStream) -> int:
        return session.agent.num_waiting(self.seconds)


class Grow(Request[Joined]):
    """Join the epoch of a larger world; see Agent.grow."""

    world_size: int
    seconds: Seconds

    def execute(self, session: Session, stream: AgentStream) -> Joined:
        session.grow(self.world_size, self.seconds, stream.raise_if_closed)
        return Joined.of(session.agent)
