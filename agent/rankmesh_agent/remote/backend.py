"""Collectives that an attached process has its agent make: what each sends there, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.remote.state import RemoteActiveCall, RemoteGroupState
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import HAS_NOTE, NO_OP, Request
from rankmesh_agent.wire.dtypes import NONE, code_of
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

if TYPE_CHECKING:
    from rankmesh_agent.remote.agent import RemoteAgent

Arrays = Sequence[Array]


class _Moved(NamedTuple):
    """What a collective moves between this process and its agent.

    Attributes:
        outputs: arrays that the agent fills besides those that it is sent.
        inputs: arrays that it is sent.
        down: arrays that come back.
        root: group rank, -1 for collectives without one.
        op: how elements are reduced, None for collectives that do not.
        made: elements of an array that is only made.
    """

    outputs: Arrays = ()
    inputs: Arrays = ()
    down: Arrays = ()
    root: int = -1
    op: ReduceOp | None = None
    made: int = 0


def _broadcast(rank: int, array: Array, root: int) -> _Moved:
    return _Moved((), [array], (), root) if rank == root else _Moved([array], (), [array], root)


_MOVES: dict[OpType, Callable[..., _Moved]] = {
    OpType.BARRIER: lambda rank: _Moved(),
    OpType.ALL_REDUCE: lambda rank, array, op: _Moved((), [array], [array], -1, op),
    OpType.REDUCE: lambda rank, array, op, root: _Moved((), [array], [array] if rank == root else (), root, op),
    OpType.BROADCAST: _broadcast,
    OpType.ALL_GATHER: lambda rank, outputs, array: _Moved(outputs, [array], outputs),
    OpType.GATHER: lambda rank, outputs, array, root: _Moved(outputs, [array], outputs, root),
    OpType.SCATTER: lambda rank, output, inputs, root: _Moved([output], inputs, [output], root),
    OpType.REDUCE_SCATTER: lambda rank, output, inputs, op: _Moved([output], inputs, [output], -1, op),
    OpType.ALL_TO_ALL: lambda rank, outputs, inputs: _Moved(outputs, inputs, outputs),
    OpType.EMPTY: lambda rank, count: _Moved(made=count),
}
"""By kind: given this group rank, and what the algorithm takes."""


class RemoteBackend(Backend):
    """Has the agent make the calls.

    Args:
        agent: this process's.
        group: id of the group.
        rank: this group rank.
        medium: what carries the group's data.
        running: the call under way.
        standing: of the group.
    """

    name: ClassVar[str] = "mesh"

    def __init__(
        self,
        agent: RemoteAgent,
        group: int,
        rank: int,
        medium: str,
        running: RemoteActiveCall,
        standing: RemoteGroupState,
    ) -> None:
        self.medium = medium
        self._agent = agent
        self._group = group
        self._rank = rank
        self._running = running
        self._standing = standing

    def algorithm(self, call: Call) -> Algorithm:
        moves, kind = _MOVES[call.kind], call.kind
        dtype = NONE if call.dtype is None else code_of(call.dtype)

        def ask(*arguments: Any) -> None:
            outputs, inputs, down, root, op, made = moves(self._rank, *arguments)
            running = self._running
            seconds, note = running.deadline.seconds, running.details
            document = attach_frames.encode_call(
                attach_frames.Call(
                    self._group,
                    seconds,
                    root,
                    made,
                    0,
                    kind,
                    NO_OP if op is None else op,
                    dtype,
                    tuple(array.size for array in outputs),
                    tuple(array.size for array in inputs),
                    call.subject,
                )
            )
            self._agent.request(
                Request.CALL,
                document,
                seconds,
                up=[as_bytes(array) for array in inputs],
                down=[as_bytes(array) for array in down],
                flags=0 if note is None else HAS_NOTE,
                note=note,
                heard=self._standing.on_agent_error,
            )

        return ask

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        algorithm(*arguments)

    def close(self) -> None:
        """Nothing to let go of."""
