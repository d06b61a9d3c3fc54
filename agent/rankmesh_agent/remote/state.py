"""State of a group in an attached process: its failure, its call in progress, and its link, which the agent serves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.state import START_UP, GroupState
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.progress.message_link import Payload, VerifiedLink, Wait
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import call_to_json, error_from_json, error_to_json
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError

_MAX_UNREPORTED = 200
"""Ended calls that are kept for the next report to the agent; of more, the latest."""


class RemoteGroupState(GroupState):
    """State of a group whose failures the agent detects. No call waits for messages in this process.

    Args:
        client: of the agent.
        group: id of the group.
        name: the group's name for people.
        ranks: the members, by group rank.
        runs_locally: whether this process makes the calls itself: in the members' shared memory, or with a custom
            backend.
    """

    def __init__(
        self, client: AgentClient, group: int, name: str, ranks: tuple[int, ...], *, runs_locally: bool
    ) -> None:
        super().__init__(group, name, ranks, FlightRecorder(_MAX_UNREPORTED), threading.RLock())
        self.runs_locally = runs_locally
        self._client = client
        self._agent_error: BaseException | None = None

    def on_agent_error(self, error: BaseException) -> None:
        """Record an error that the agent raised in a call: the agent has ended the group already, if it has to."""
        self._agent_error = error

    def abort(self, error: BaseException) -> None:
        """End the group because of an error in this process; the agent reports it to the members."""
        if self.failure is None:
            at_agent = error is self._agent_error
            failure = self._client.group_failure(self._group) if at_agent else self._abort(error)
            if failure is not None:
                self.fail(failure)

    def _abort(self, error: BaseException) -> DistError | None:
        call = call_to_json(self.call) if self.runs_locally and self.call is not START_UP else None
        document = {
            "group": self._group,
            "call": call,
            "seq": self.seq,
            "busy": self.started_at is not None,
            "error": error_to_json(error),
        }
        try:
            with interrupts_deferred():
                failure = error_from_json(self._client.control(Request.ABORT, document))
        except DistError as lost:
            return lost
        return failure if isinstance(failure, DistError) else None

    def to_json(self) -> dict[str, Any]:
        """Return the call as requests to the agent have it."""
        return {"group": self._group, "call": call_to_json(self.call), "seq": self.seq}

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See CallContext. The agent checks the peers."""
        self.raise_if_failed()
        left = -1.0 if self.deadline.expired() else self.deadline.remaining()
        waiting_for = missing()
        document = {**self.to_json(), "missing": waiting_for, "seconds": self.deadline.seconds, "left": left}
        try:
            self._client.request_json(Request.CHECK_PEERS, document)
        except DistError:
            # A rank may have come after it was listed, and have left before the agent looked. The next check decides.
            if missing() == waiting_for:
                raise

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Not offered: the agent moves messages, and waits for them."""
        raise AssertionError("an attached process has no messages of its own to wait for")


class RemoteLink(VerifiedLink):
    """Link of a call that this process makes itself: the agent exchanges the few messages that it needs.

    Args:
        client: of the agent.
        state: of the group.
        rank: this group rank.
    """

    def __init__(self, client: AgentClient, state: RemoteGroupState, rank: int) -> None:
        self.rank = rank
        self.size = len(state.ranks)
        self._client = client
        self._state = state
        self._fingerprint = 0

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """See VerifiedLink."""
        self._fingerprint = fingerprint

    def arrive(self) -> None:
        """See VerifiedLink."""
        frame = self._request(Request.VERIFY, fingerprint=self._fingerprint)
        if frame.header.kind == Response.PENDING:
            raise CallMismatchError

    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """See VerifiedLink."""
        frame = self._request(Request.EXCHANGE_DESCRIPTIONS, said=bytes(payload).decode("utf-8", "replace"))
        return [text.encode() for text in attach_frames.decode_json(frame.document)["told"]]

    def _request(self, kind: Request, **fields: Any) -> Any:
        deadline = self._state.deadline
        document = {**self._state.to_json(), "seconds": deadline.remaining(), **fields}
        return self._client.request_json(kind, document, deadline.seconds)
