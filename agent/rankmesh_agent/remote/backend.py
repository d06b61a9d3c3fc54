"""Backends of an attached process: its agent runs the collectives, or compares those of a user's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.collectives.link import as_bytes
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.remote.calls import Arguments, Collective, Verify
from rankmesh_agent.remote.state import RemoteGroupState
from rankmesh_agent.wire.dtypes import NONE, code_of
from rankmesh_agent.wire.ops import Call


class RemoteBackend(Backend):
    """Has the agent run the calls of a group, whose data a medium carries."""

    name: ClassVar[str] = "mesh"
    allocates = True

    def __init__(self, state: RemoteGroupState, rank: int, medium: str) -> None:
        self.medium = medium
        self._rank = rank
        self._state = state

    def algorithm(self, call: Call) -> Algorithm:
        def request(*values: Any) -> None:
            inputs, outputs, in_place, root, op = Arguments.of(call.kind, self._rank, values)
            state = self._state
            collective = Collective(
                state.group,
                call.kind,
                state.deadline.seconds,
                _code(call),
                [array.size for array in inputs],
                [array.size for array in outputs],
                in_place,
                root,
                op,
                call.count,
                call.subject,
                state.describe(),
            )
            up = [as_bytes(array) for array in inputs]
            down = up if in_place else [as_bytes(array) for array in outputs]
            state.ask(collective, up=up, down=down, in_place=in_place)

        return request

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        algorithm(*arguments)

    def close(self) -> None:
        """Do nothing: the agent closes its own backend."""


class EngineBackend(CustomBackend):
    """Runs the engine of a user in this process once the agent has compared the members' calls; see CustomBackend."""

    def __init__(self, name: str, engine: Any, state: RemoteGroupState) -> None:
        self.name = self.medium = name  # type: ignore[misc]  # each engine has a name of its own
        self._engine = engine
        self._state = state

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        call, state = context.call, self._state
        counts = None if call.counts is None else list(call.counts)
        compared = _code(call), call.count, call.reduce_op, call.root, counts, call.subject
        state.ask(Verify(state.group, self.name, state.deadline.seconds, context.describe(), call.kind, *compared))
        algorithm(*arguments)


def _code(call: Call) -> int:
    return NONE if call.dtype is None else code_of(call.dtype)
