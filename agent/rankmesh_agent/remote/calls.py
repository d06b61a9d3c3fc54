"""Requests of an attached process to run collectives and messages; see remote.requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
from msgspec import msgpack

from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.codec import ErrorData, error_from
from rankmesh_agent.remote.requests import Length, Request, Seconds
from rankmesh_agent.remote.session import HeldMessage, Session
from rankmesh_agent.remote.staging import AgentStream
from rankmesh_agent.wire.dtypes import FROM_CODE, NONE
from rankmesh_agent.wire.errors import CollectiveTimeoutError, ProtocolError
from rankmesh_agent.wire.ops import OpType, ReduceOp

ARGUMENTS: dict[OpType, tuple[str, ...]] = {
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


def arrays_of(kind: OpType, rank: int, arguments: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """Return the arrays of a collective, at a group rank, that are sent to the agent, and those that it fills.

    Whether it also changes those that are sent, and sends them back, comes third.
    """
    if "array" in arguments:
        array, is_root = [arguments["array"]], arguments.get("root") == rank
        if kind is OpType.BROADCAST:
            return (array, [], False) if is_root else ([], array, False)
        return array, [], kind is OpType.ALL_REDUCE or is_root
    inputs = [arguments["input"]] if "input" in arguments else arguments.get("inputs", ())
    outputs = [arguments["output"]] if "output" in arguments else arguments.get("outputs", ())
    return inputs, outputs, False


class Collective(Request[None]):
    """Run a collective, with a group rank as root; see ``arrays_of`` and wire.ops.Call."""

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
        arguments = [given[name] for name in ARGUMENTS[self.kind]]
        options = Options(self.seconds, details=(lambda: self.details) if self.details else None)
        subject = [self.subject] if self.subject else []
        getattr(group, self.kind.name.lower())(*arguments, options, *subject)
        stream.return_arrays(inputs if self.in_place else outputs)


class Message(Request[int | None]):
    """Begin a point-to-point message; with ``blocking``, complete it.

    The result is None while it is not complete, then the rank of the sender. ``number`` is counted by the client.
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
        if array is not None:
            stream.return_message(array)
        return -1 if array is None else message.source()


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


REQUESTS: msgpack.Decoder[Request[Any]] = msgpack.Decoder(Union[tuple(Request.__subclasses__())])  # noqa: UP007


def _dtype(code: int) -> np.dtype[Any]:
    """Return an element type by its code; raise ProtocolError for an unknown one."""
    dtype = FROM_CODE.get(code)
    if dtype is None:
        raise ProtocolError(f"there is no element type {code}")
    return dtype
