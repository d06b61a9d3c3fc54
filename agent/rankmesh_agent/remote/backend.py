"""Group state and backends of an attached process: its agent runs the calls, or compares those of a user's engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.collectives.link import as_bytes
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.remote.calls import ARGUMENTS, Collective, Verify, arrays_of
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import error_data
from rankmesh_agent.remote.requests import Abort, Request
from rankmesh_agent.wire.dtypes import NONE, code_of
from rankmesh_agent.wire.errors import without_traceback
from rankmesh_agent.wire.ops import Call


class RemoteGroupState(GroupState):
    """State of a group, by its id, whose calls the agent executes, and records."""

    def __init__(self, client: AgentClient, group: int, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(group, name, ranks, FlightRecorder(0), threading.RLock())
        self._client = client

    def ask(self, request: Request[None], **arrays: Any) -> None:
        """Have the agent execute a call of the group; see AgentClient.ask for its arrays."""
        self._client.ask(request, self.deadline.seconds, **arrays)

    def abort(self, error: BaseException) -> None:
        """End the group because of an error; the agent reports it to the members, unless it has raised it."""
        if self.failure is None:
            with interrupts_deferred():
                failure = self._client.failure(Abort(error_data(error), self.group))
            if failure is not None:
                self.fail(without_traceback(failure))


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
            arguments = dict(zip(ARGUMENTS[call.kind], values, strict=True))
            inputs, outputs, in_place = arrays_of(call.kind, self._rank, arguments)
            state = self._state
            collective = Collective(
                state.group,
                call.kind,
                state.deadline.seconds,
                _code(call),
                [array.size for array in inputs],
                [array.size for array in outputs],
                in_place,
                arguments.get("root", -1),
                arguments.get("op"),
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
