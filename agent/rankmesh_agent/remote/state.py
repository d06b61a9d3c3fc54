"""State of a group in an attached process: its failure, which the agent detects, and its call in progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import error_data
from rankmesh_agent.remote.requests import Abort, Request
from rankmesh_agent.wire.errors import without_traceback


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

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See CallContext. The agent checks the peers."""
        self.raise_if_failed()

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
    ) -> None:
        """Not offered: the agent moves messages, and waits for them."""
        raise AssertionError("an attached process has no messages of its own to wait for")
