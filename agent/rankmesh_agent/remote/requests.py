"""Requests of an attached process to its agent: a class for each, with its fields, its result and its execution.

A request, and its result, is the document of a frame (wire.attach_frames) in MessagePack, which has all float numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union, get_args

import msgspec
import numpy as np
from msgspec import Meta, msgpack

from rankmesh_agent.agent import Agent
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.codec import ErrorData, error_data, error_from
from rankmesh_agent.remote.session import HeldMessage, Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.wire import goodbye
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError, ProtocolError
from rankmesh_agent.wire.ops import OpType, ReduceOp
from rankmesh_agent.wire.schemas import LeaseTerms, Member

R = TypeVar("R")
Seconds = Annotated[float, Meta(ge=0)]
Length = Annotated[int, Meta(ge=0)]
"""Elements of an array."""


class GroupDescription(NamedTuple):
    """A group, as the agent describes it to the attached process.

    Attributes:
        id, name, ranks, timeout, medium: see Communicator.
    """

    id: int
    name: str
    ranks: list[int]
    timeout: float
    medium: str

    @classmethod
    def of(cls, group: LocalCommunicator) -> GroupDescription:
        """Return the description of a group."""
        return cls(group.id, group.name, list(group.ranks), group.timeout, group.medium)


class Joined(NamedTuple):
    """A rank of a job that an agent has joined: the lease's id, the rank, all members, and the group of all ranks."""

    lease: str
    rank: int
    members: list[Member]
    world: GroupDescription

    @classmethod
    def of(cls, agent: Agent, lease: str = "") -> Joined:
        """Return the description of an agent that has joined its job."""
        return cls(
            lease,
            agent.member.rank,
            [member for _, member in sorted(agent.members.items())],
            GroupDescription.of(agent.world),
        )


class Request(msgspec.Struct, Generic[R], tag=True):
    """A request whose result is an R."""

    def execute(self, session: Session, stream: AgentStream) -> R:
        """Execute the request at the agent; return its result.

        Args:
            session: of the attached process.
            stream: has brought the request, and has its arrays.
        """
        raise ProtocolError(f"an attached process sent a {type(self).__name__} where there is none")

    @classmethod
    @functools.cache
    def results(cls) -> msgpack.Decoder[R]:
        """Return the decoder of the results."""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        return msgpack.Decoder(get_args(base)[0])


# The lease: requests on its connection


class Acquire(Request[Joined]):
    """Lease the agent, and have it join the job within ``joining`` seconds."""

    terms: LeaseTerms
    joining: Seconds


class Release(Request[None]):
    """End the lease; see Agent.close for the fields."""

    reason: str
    raised: bool
    exit_text: str


# Calls with arrays: requests on another connection, as all that follow

_ARGUMENTS: dict[OpType, tuple[str, ...]] = {
    OpType.BARRIER: (),
    OpType.ALL_REDUCE: ("array", "op"),
    OpType.REDUCE: ("array", "op", "root"),
    OpType.BROADCAST: ("array", "root"),
    OpType.ALL_GATHER: ("outputs", "input"),
    OpType.GATHER: ("outputs", "input", "root"),
    OpType.SCATTER: ("output", "inputs", "root"),
    OpType.REDUCE_SCATTER: ("output", "inputs", "op"),
    OpType.ALL_TO_ALL: ("outputs", "inputs"),
    OpType.EMPTY: ("dtype", "count"),
}
"""Arguments of each collective, of the Communicator's method and of the algorithm alike; see Communicator."""


class Arguments(NamedTuple):
    """Arguments of a collective at one rank.

    Attributes:
        inputs: arrays that are sent to the agent.
        outputs: arrays that the agent fills and sends back.
        in_place: whether the agent changes the inputs and sends them back.
        root: group rank, -1 for collectives without one.
        op: reduction of the elements, None for collectives without one.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    in_place: bool
    root: int
    op: ReduceOp | None

    @classmethod
    def of(cls, kind: OpType, rank: int, values: Sequence[Any]) -> Arguments:
        """Return the arguments of an algorithm of this kind at a group rank."""
        named = dict(zip(_ARGUMENTS[kind], values, strict=True))
        root = named.get("root", -1)
        inputs = [named["input"]] if "input" in named else named.get("inputs", ())
        outputs = [named["output"]] if "output" in named else named.get("outputs", ())
        if kind is OpType.BROADCAST and rank != root:
            outputs = [named["array"]]
        elif "array" in named:
            inputs = [named["array"]]
        in_place = kind is OpType.ALL_REDUCE or (kind is OpType.REDUCE and rank == root)
        return cls(inputs, outputs, in_place, root, named.get("op"))


class Collective(Request[None]):
    """Run a collective; see Arguments and wire.ops.Call."""

    group: int
    kind: OpType
    seconds: Seconds
    dtype: int
    inputs: list[Length]
    outputs: list[Length]
    in_place: bool = False
    root: int = -1
    op: ReduceOp | None = None
    count: int = 0
    subject: str = ""
    details: str = ""

    def execute(self, session: Session, stream: AgentStream) -> None:
        dtype = np.dtype(np.uint8) if self.dtype == NONE else _dtype(self.dtype)
        inputs, outputs = stream.take_arrays(dtype, self.inputs, self.outputs)
        group = session.group(self.group)
        given: dict[str, Any] = {
            "array": next(iter(inputs or outputs), None),
            "input": next(iter(inputs), None),
            "inputs": inputs,
            "output": next(iter(outputs), None),
            "outputs": outputs,
            "root": self.root,
            "op": self.op,
            "dtype": dtype,
            "count": self.count,
        }
        arguments = [given[name] for name in _ARGUMENTS[self.kind]]
        options = Options(self.seconds, details=(lambda: self.details) if self.details else None)
        subject = [self.subject] if self.subject else []
        getattr(group, self.kind.name.lower())(*arguments, options, *subject)
        stream.return_arrays(inputs if self.in_place else outputs)


class Message(Request[int | None]):
    """Begin a point-to-point message; with ``blocking``, complete it.

    The result is None while it is not complete, then the rank of the sender of a received message, and the number of a
    sent one if its receiver may still refuse it. ``number`` is counted by the client.
    """

    group: int
    number: int
    sends: bool
    rank: int
    tag: int
    dtype: int
    count: Length
    seconds: Seconds
    blocking: bool

    def execute(self, session: Session, stream: AgentStream) -> int | None:
        array = stream.take_message(_dtype(self.dtype), self.count, sent=self.sends)
        group = session.group(self.group)
        if group.state.unanswered:
            group.raise_refusal()
        options = Options(self.seconds, async_op=not self.blocking)
        message = group.messages.begin("send" if self.sends else "recv", array, self.rank, self.tag, options)
        session.messages[self.number] = HeldMessage(group, message, None if self.sends else array)
        transfer = message.transfer
        if not self.blocking and not (transfer.done and transfer.error is None):
            return None  # the wait for it raises the error
        return Wait(self.number, None, self.blocking).execute(session, stream)


class Wait(Request[int | None]):
    """Wait for a message: for its ``own`` time limit, or others ``seconds``, or not at all. See Message."""

    number: int
    seconds: Seconds | None
    own: bool

    def execute(self, session: Session, stream: AgentStream) -> int | None:
        _, message, array = session.message(self.number)
        deadline = None if self.seconds is None else Deadline(self.seconds)
        try:
            done = message.complete(message.deadline if self.own else deadline)
        except CollectiveTimeoutError:
            if self.own or message.transfer.error is not None:
                session.messages.pop(self.number, None)
            raise
        except BaseException:
            session.messages.pop(self.number, None)
            raise
        if not done:
            return None
        session.messages.pop(self.number, None)
        if array is None:
            return message.transfer.eager_id
        stream.return_message(array)
        return message.source()


class Cancel(Request[None]):
    """Abandon a message; it is waited for no more, unless ``waited``: then its wait raises the error."""

    number: int
    error: ErrorData
    waited: bool

    def execute(self, session: Session, stream: AgentStream) -> None:
        held = session.messages.get(self.number)
        if held is not None:
            held.message.abandon(error_from(self.error, at_agent=True))
            if not self.waited:
                session.messages.pop(self.number, None)


class Refusal(Request[None]):
    """Raise the error of an eager message, by default of any, if its receiver has refused it."""

    group: int
    eager_id: int | None = None

    def execute(self, session: Session, stream: AgentStream) -> None:
        group = session.group(self.group)
        if self.eager_id is None:
            group.raise_refusal()
        elif (error := group.messages.take_refusal(self.eager_id)) is not None:
            raise error


class Verify(Request[None]):
    """Compare the members' calls of an engine at the client, which executes them then. See wire.ops.Call."""

    group: int
    engine: str
    seconds: Seconds
    details: str
    kind: OpType
    dtype: int
    count: int
    op: ReduceOp | None
    root: int | None
    counts: list[int] | None
    subject: str

    def execute(self, session: Session, stream: AgentStream) -> None:
        group = session.group(self.group)
        if not isinstance(group.queue.backend, CustomBackend):
            group.use_custom_backend(self.engine, object())  # an HTTP client can make no call of it
        dtype = None if self.dtype == NONE else _dtype(self.dtype)
        counts = None if self.counts is None else tuple(self.counts)
        key = self.kind, dtype, self.count, self.op, self.root, counts, self.subject
        options = Options(self.seconds, details=lambda: self.details)
        group.queue.execute(group.queue.plan(key, lambda *_: None), ((),), options)


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
    """End a group at this rank; ``how`` is the frame of a Goodbye, if it needs one."""

    group: int
    how: tuple[int, bytes] | None

    def execute(self, session: Session, stream: AgentStream) -> None:
        how = None if self.how is None else goodbye.decode(*self.how)
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
    """Return the first failure of a group, of all, or that names one of some ranks."""

    group: int | None = None
    naming: list[int] | None = None

    def execute(self, session: Session, stream: AgentStream) -> ErrorData | None:
        failure: DistError | None = session.ended()
        if failure is None and self.group is not None:
            failure = session.group(self.group).failure
        elif failure is None and self.naming is not None:
            failure = session.agent.failure_naming(self.naming)
        elif failure is None:
            failure = session.agent.first_failure
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


REQUESTS: msgpack.Decoder[Request[Any]] = msgpack.Decoder(Union[tuple(Request.__subclasses__())])  # noqa: UP007


def _dtype(code: int) -> np.dtype[Any]:
    """Return an element type by its code.

    Raises:
        ProtocolError: there is none of that code.
    """
    dtype = FROM_CODE.get(code)
    if dtype is None:
        raise ProtocolError(f"there is no element type {code}")
    return dtype
