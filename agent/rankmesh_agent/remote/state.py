"""Whether a group of an attached process can go on, which its agent knows, and the call that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.collectives.link import Exchange
from rankmesh_agent.group.flight_recorder import FlightRecorder, Record
from rankmesh_agent.group.pending import Details
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.message_link import Payload, VerifiedLink, Wait
from rankmesh_agent.remote import errors
from rankmesh_agent.remote.codec import call_told
from rankmesh_agent.transports.segment import CallMismatchError
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request, Response
from rankmesh_agent.wire.errors import DistError, GroupAbortedError, from_code
from rankmesh_agent.wire.ops import Call

if TYPE_CHECKING:
    from rankmesh_agent.remote.agent import AttachedAgent

_KEPT = 200
"""How many calls that have ended are kept until the agent is told of them: of more, the latest."""


class AttachedStanding:
    """What one attached process knows of its group's failures. An order.Footing.

    Args:
        agent: knows more.
        group: id of the group.
        name: the group's name for people.
        ranks: the members, by group rank.

    Attributes:
        own: whether this process makes the calls itself: over the members' memory, or by an engine from outside.
        failure: the first failure that this process has heard of.
        seq: number of the latest call.
        begun: when it began, by the monotonic clock; None when it has ended.
        nbytes: what its arrays hold.
        call: the latest call, None before the first.
        numbers: see Calls.
        lock: see Footing.
    """

    def __init__(self, agent: AttachedAgent, group: int, name: str, ranks: tuple[int, ...], *, own: bool) -> None:
        self.own = own
        self.failure: DistError | None = None
        self.seq = 0
        self.started_at: float | None = None
        self.nbytes = 0
        self.call: Call | None = None
        self.global_ranks = self._ranks = ranks
        self.lock = threading.RLock()
        self._agent = agent
        self._group = group
        self.name = name
        self.recorder = FlightRecorder(_KEPT)
        self._heard: BaseException | None = None

    @property
    def id(self) -> str:
        """The group's id, as people are told."""
        return f"{self._group:016x}"

    def matches(self, name: str) -> bool:
        """See Owner."""
        return name in (self.name, self.id)

    def global_rank(self, rank: int) -> int:
        """See Owner."""
        return self.global_ranks[self._ranks.index(rank)]

    def active_record(self) -> Record | None:
        """See Footing."""
        begun, call = self.started_at, self.call
        return None if begun is None or call is None else (self, call, self.seq, begun, None, "", self.nbytes)

    def raise_if_failed(self) -> None:
        """See Footing."""
        if self.failure is not None:
            raise from_code(self.failure.code, self.failure.message, **self.failure.details())

    def heard(self, error: BaseException) -> None:
        """Take note of an error that the agent raised as it made a call: it has done what there is to do."""
        self._heard = error

    def abort(self, error: BaseException) -> None:
        """See Footing."""
        if self.failure is not None:
            return
        self.failure = self._agent.failure_of(self._group) if error is self._heard else self._abort(error)

    def _abort(self, error: BaseException) -> DistError | None:
        call = call_told(self.call) if self.own and self.call is not None else None
        said = {
            "group": self._group,
            "call": call,
            "seq": self.seq,
            "busy": self.started_at is not None,
            "error": errors.described(error),
        }
        try:
            failure = errors.revived(self._agent.tell(Request.ABORT, said))
        except DistError as gone:
            return gone
        return failure if isinstance(failure, DistError) else None

    def mark_destroyed(self) -> None:
        """Take note that this rank has left the group."""
        with self.lock:
            if self.failure is None:
                self.failure = GroupAbortedError(f"group {self.name!r} has been destroyed", group=self.name)


class AttachedCall(CallContext):
    """A group's call under way, one after the other. An order.Running.

    Args:
        agent: this process's.
        group: id of the group.
        standing: of the group.

    Attributes:
        deadline: when the call has to be over.
    """

    def __init__(self, agent: AttachedAgent, group: int, standing: AttachedStanding) -> None:
        self.deadline = Deadline(0)
        self.options_note: Details = None
        self._agent = agent
        self._group = group
        self._standing = standing

    def begin(self, call: Call, seq: int, nbytes: int, seconds: float, note: Details = None) -> float:
        """See Running."""
        standing, deadline = self._standing, self.deadline
        self.call, self.seq = call, seq
        standing.call = call
        standing.seq, standing.nbytes = seq, nbytes
        self.options_note = note
        deadline.restart(seconds)
        begun = standing.started_at = deadline.started
        return begun

    def told(self) -> dict[str, Any]:
        """Return the call as the agent is told of it."""
        return {"group": self._group, "call": call_told(self.call), "seq": self.seq}

    @property
    def global_ranks(self) -> Sequence[int]:
        """See Watch."""
        return self._standing.global_ranks

    def details(self) -> str:
        """See Watch."""
        return "" if self.options_note is None else self.options_note()

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See Watch."""
        self._standing.raise_if_failed()
        left = -1.0 if self.deadline.expired() else self.deadline.remaining()
        said = {**self.told(), "missing": missing(), "seconds": self.deadline.seconds, "left": left}
        self._agent.ask(Request.CHECK_PEERS, attach_frames.encode_json(said), 0.0)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See Watch. It is the agent that moves messages and waits for them."""
        raise AssertionError("an attached process has no messages of its own to wait for")


class RemoteRounds(VerifiedLink):
    """The messages among the members' agents that a call which this process makes itself needs of its agent's.

    Args:
        agent: this process's.
        running: the call.
        rank: this group rank.
        size: ranks in the group.
    """

    def __init__(self, agent: AttachedAgent, running: AttachedCall, rank: int, size: int) -> None:
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
        frame = self._agent.ask(Request.VERIFY, attach_frames.encode_json(said), self._running.deadline.seconds)
        if frame.header.kind == Response.PENDING:
            raise CallMismatchError
        return [b""] * self.size

    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """See Rounds."""
        said = {**self._said(), "said": bytes(payload).decode("utf-8", "replace")}
        frame = self._agent.ask(
            Request.EXCHANGE_DESCRIPTIONS, attach_frames.encode_json(said), self._running.deadline.seconds
        )
        return [text.encode() for text in attach_frames.decode_json(frame.document)["told"]]

    def _said(self) -> dict[str, Any]:
        return {**self._running.told(), "seconds": self._running.deadline.remaining()}

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
