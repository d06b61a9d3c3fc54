"""Backends of an attached process, which has its agent run the collectives, and the arrays that each transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import call_to_json
from rankmesh_agent.remote.state import RemoteGroupState
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import NO_OP, Request
from rankmesh_agent.wire.dtypes import NONE, code_of
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Arrays = Sequence[Array]


class _Transfer(NamedTuple):
    """Arrays that a collective transfers between this process and its agent.

    Attributes:
        outputs: arrays that the agent fills and sends back.
        inputs: arrays that are sent to the agent.
        in_place: whether the agent changes the inputs and sends them back.
        root: group rank, -1 for collectives without one.
        op: reduction of the elements, None for collectives without one.
        length: elements of an array that is only allocated.
    """

    outputs: Arrays = ()
    inputs: Arrays = ()
    in_place: bool = False
    root: int = -1
    op: ReduceOp | None = None
    length: int = 0


def _broadcast(rank: int, array: Array, root: int) -> _Transfer:
    return _Transfer((), [array], root=root) if rank == root else _Transfer([array], root=root)


_TRANSFERS: dict[OpType, Callable[..., _Transfer]] = {
    OpType.BARRIER: lambda rank: _Transfer(),
    OpType.ALL_REDUCE: lambda rank, array, op: _Transfer((), [array], True, op=op),
    OpType.REDUCE: lambda rank, array, op, root: _Transfer((), [array], rank == root, root, op),
    OpType.BROADCAST: _broadcast,
    OpType.ALL_GATHER: lambda rank, outputs, array: _Transfer(outputs, [array]),
    OpType.GATHER: lambda rank, outputs, array, root: _Transfer(outputs, [array], root=root),
    OpType.SCATTER: lambda rank, output, inputs, root: _Transfer([output], inputs, root=root),
    OpType.REDUCE_SCATTER: lambda rank, output, inputs, op: _Transfer([output], inputs, op=op),
    OpType.ALL_TO_ALL: lambda rank, outputs, inputs: _Transfer(outputs, inputs),
    OpType.EMPTY: lambda rank, count: _Transfer(length=count),
}
"""By kind: called with this group rank, and the algorithm's arguments."""


class RemoteBackend(Backend):
    """Has the agent run the calls.

    Args:
        client: of the agent.
        group: id of the group.
        rank: this group rank.
        medium: what carries the group's data.
        state: of the group.
    """

    name: ClassVar[str] = "mesh"
    allocates = True

    def __init__(self, client: AgentClient, group: int, rank: int, medium: str, state: RemoteGroupState) -> None:
        self.medium = medium
        self._client = client
        self._group = group
        self._rank = rank
        self._state = state

    def algorithm(self, call: Call) -> Algorithm:
        transfer, kind = _TRANSFERS[call.kind], call.kind
        dtype = NONE if call.dtype is None else code_of(call.dtype)

        def request(*arguments: Any) -> None:
            outputs, inputs, in_place, root, op, length = transfer(self._rank, *arguments)
            state = self._state
            seconds = state.deadline.seconds
            document = attach_frames.encode_call(
                attach_frames.Call(
                    self._group,
                    seconds,
                    root,
                    length,
                    0,
                    kind,
                    NO_OP if op is None else op,
                    dtype,
                    tuple(array.size for array in outputs),
                    tuple(array.size for array in inputs),
                    call.subject,
                    state.describe(),
                )
            )
            self._client.request(
                Request.CALL,
                document,
                seconds,
                up=[as_bytes(array) for array in inputs],
                down=[as_bytes(array) for array in (inputs if in_place else outputs)],
                in_place=in_place,
                on_error=state.on_agent_error,
            )

        return request

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        algorithm(*arguments)

    def close(self) -> None:
        """Do nothing: the agent closes its own backend."""


class EngineBackend(CustomBackend):
    """Runs the engine of a user in this process once the agent has compared the members' calls.

    Args:
        name, engine: see CustomBackend.
        client: of the agent.
        group: id of the group.
        state: of the group.
    """

    def __init__(self, name: str, engine: Any, client: AgentClient, group: int, state: RemoteGroupState) -> None:
        self.name = self.medium = name  # type: ignore[misc]  # each engine has a name of its own
        self._engine = engine
        self._client = client
        self._group = group
        self._state = state

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        seconds = self._state.deadline.seconds
        document = attach_frames.encode_json(
            {
                "group": self._group,
                "engine": self.name,
                "call": call_to_json(context.call),
                "details": context.describe(),
                "seconds": seconds,
            }
        )
        self._client.request(Request.VERIFY, document, seconds, on_error=self._state.on_agent_error)
        algorithm(*arguments)
