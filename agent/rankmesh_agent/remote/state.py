"""Failure state and call under way of a group of an attached process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rankmesh_agent.collectives.link import Exchange
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.pending import ActiveCall
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.progress.message_link import Payload, VerifiedLink, Wait
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.codec import call_to_json
from rankmesh_agent.transports.segment import CallMismatchError
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError

if TYPE_CHECKING:
    from rankmesh_agent.remote.agent import RemoteAgent

_MAX_UNREPORTED = 200
"""Calls that have ended and are kept for the next report to the agent: of more, the latest."""


class RemoteGroupState(GroupState):
    """Failure state of a group of an attached process; the agent knows of the other members.

    Args:
        agent: the attached process's agent.
        group: id of the group.
        name: name of the group.
        ranks: ranks of the members, by group rank.
        runs_locally: see below.

    Attributes:
        runs_locally: whether this process executes the calls itself: in shared memory, or by a custom backend.
    """

    def __init__(
        self, agent: RemoteAgent, group: int, name: str, ranks: tuple[int, ...], *, runs_locally: bool
    ) -> None:
        super().__init__(group, name, ranks, FlightRecorder(_MAX_UNREPORTED), threading.RLock())
        self.runs_locally = runs_locally
        self._agent = agent
        self._agent_error: BaseException | None = None

    def on_agent_error(self, error: BaseException) -> None:
        """Record an error that the agent raised in a call: the agent has ended the group if that was necessary."""
        self._agent_error = error

    def abort(self, error: BaseException) -> None:
        """See GroupState."""
        if self.failure is None:
            by_agent = error is self._agent_error
            self.failure = self._agent.group_failure(self._group) if by_agent else self._abort(error)

    def _abort(self, error: BaseException) -> DistError | None:
        document = {
            "group": self._group,
            "call": call_to_json(self.call) if self.runs_locally and self.call is not None else None,
            "seq": self.seq,
            "busy": self.started_at is not None,
            "error": codec.error_to_json(error),
        }
        try:
            failure = codec.error_from_json(self._agent.control(Request.ABORT, document))
        except DistError as lost:
            return lost
        return failure if isinstance(failure, DistError) else None


class RemoteActiveCall(ActiveCall):
    """The call under way in a group of an attached process; the agent checks the peers.

    Args:
        agent: the attached process's agent.
        group: id of the group.
        state: failure state of the group.
    """

    def __init__(self, agent: RemoteAgent, group: int, state: RemoteGroupState) -> None:
        super().__init__(state)
        self._agent = agent
        self._group = group

    def to_json(self) -> dict[str, Any]:
        """Return the call as the agent's requests describe it."""
        return {"group": self._group, "call": call_to_json(self.call), "seq": self.seq}

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See CallContext."""
        self._group_state.raise_if_failed()
        left = -1.0 if self.deadline.expired() else self.deadline.remaining()
        document = {**self.to_json(), "missing": missing(), "seconds": self.deadline.seconds, "left": left}
        self._agent.request(Request.CHECK_PEERS, attach_frames.encode_json(document), 0.0)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See CallContext. The agent moves messages and waits for them."""
        raise AssertionError("an attached process has no messages of its own to wait for")


class RemoteLink(VerifiedLink):
    """The messages among the members' agents that a call which this process makes itself needs of its agent's.

    Args:
        agent: this process's.
        running: the call.
        rank: this group rank.
        size: ranks in the group.
    """

    def __init__(self, agent: RemoteAgent, running: RemoteActiveCall, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._agent = agent
        self._running = running
        self._fingerprint = 0

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """See Rounds."""
        self._fingerprint = fingerprint

    def all_exchange(self, payload: Payload = b"", each: Sequence[Payload] | None = None) -> list[Payload]:
        """See Link.enter; without payloads."""
        if payload or each:
            self._refuse()
        said = {**self._said(), "fingerprint": self._fingerprint}
        frame = self._agent.request(Request.VERIFY, attach_frames.encode_json(said), self._running.deadline.seconds)
        if frame.header.kind == Response.PENDING:
            raise CallMismatchError
        return [b""] * self.size

    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """See Rounds."""
        said = {**self._said(), "said": bytes(payload).decode("utf-8", "replace")}
        frame = self._agent.request(
            Request.EXCHANGE_DESCRIPTIONS, attach_frames.encode_json(said), self._running.deadline.seconds
        )
        return [text.encode() for text in attach_frames.decode_json(frame.document)["told"]]

    def _said(self) -> dict[str, Any]:
        return {**self._running.to_json(), "seconds": self._running.deadline.remaining()}

    def via_root(self, payload: Payload, decide: Callable[[list[Payload]], Payload]) -> Payload:
        """Not offered."""
        self._refuse()

    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        """Not offered."""
        self._refuse()

    def finish(self, exchange: Exchange) -> None:
        """Not offered."""
        self._refuse()

    def scratch(self, nbytes: int) -> Any:
        """Not offered."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("algorithms over messages are the agent's to carry out")
