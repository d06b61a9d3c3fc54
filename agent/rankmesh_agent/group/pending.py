"""How a call, and a message, of a group wait: until it is done, or cannot be any more, or the deadline passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from rankmesh_agent.group.flight_recorder import Record, describe
from rankmesh_agent.group.message_stats import MessageLog
from rankmesh_agent.group.state import BaseGroupState, LocalGroupState
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ops import Call

OnComplete = Callable[[], None] | None
"""What to do with the arrays once the data is there (copy a staged one back)."""
Details = Callable[[], str] | None
"""Says what else there is to say of a call when the ranks' calls do not fit together (splits, shapes, call site)."""


class ActiveCall:
    """The collective call of a group that is in progress, one after the other.

    Args:
        state: of the group.

    Attributes:
        deadline: when the latest call has to be over.
    """

    def __init__(self, state: BaseGroupState) -> None:
        self._state = state
        self.deadline = Deadline(0)
        self._details: Details = None

    def begin(self, call: Call, seq: int, nbytes: int, seconds: float, note: Details = None) -> float:
        """Go on to another call; return when it began, by the monotonic clock.

        Args:
            call: what it is.
            seq: its number.
            nbytes: what its arrays hold.
            seconds: how long it may take.
            note: see Options.
        """
        state = self._state
        self.call = state.call = call
        self.seq = state.seq = seq
        state.nbytes = nbytes
        self._details = note
        # Written out here what Deadline.restart does: calling it would take longer than doing it.
        deadline = self.deadline
        deadline.seconds = seconds
        begun = state.started_at = deadline.started = monotonic()
        deadline.at = begun + seconds
        return begun

    @property
    def global_ranks(self) -> Sequence[int]:
        """See Watch."""
        return self._state.global_ranks

    def details(self) -> str:
        """See Watch."""
        return "" if self._details is None else self._details()


class LocalActiveCall(ActiveCall):
    """A call whose messages this process carries: a CallContext.

    Args:
        state: of the group.
    """

    _state: LocalGroupState

    def __init__(self, state: LocalGroupState) -> None:
        super().__init__(state)

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See Watch."""
        standing = self._state
        standing.mesh.progress()
        standing.raise_if_failed()
        if standing.mesh.closed:
            raise GroupAbortedError("this process has left the job")
        waiting_for = [standing.ranks[member] for member in missing()]
        if not waiting_for:
            return  # the last one came meanwhile, and may have left since
        words = f"{self.call.name} #{self.seq}"
        standing.raise_if_peer_lost(waiting_for, words)
        if self.deadline.expired():
            raise standing.timeout_error(waiting_for, words, self.deadline, self.seq)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See Watch."""
        standing = self._state
        mesh = standing.mesh

        def settled() -> bool:
            if ready():
                return True
            if standing.failure is None and not mesh.lost_peers:
                return False
            return standing.cannot_complete([standing.ranks[member] for member in missing()])

        while True:
            mesh.wait(settled, self.deadline)
            with mesh.lock:
                if ready():
                    return
            self.check(missing)


class MessageTransport(Protocol):
    """What carries a group's messages: see progress.matching.MessageMatcher, which does over connections."""

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank."""

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from any."""

    def progress_in_background(self, transfer: Transfer) -> None:
        """See to it that a message moves while nobody waits for it."""

    def cancel(self, transfer: Transfer) -> bool:
        """Undo a transfer that has not begun; False if data may be on its way."""

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``; without the mesh's lock, which the others need, and ``ready`` is called with."""

    def progress(self) -> None:
        """Move what can be moved now, also without the lock."""


class PendingMessage:
    """A point-to-point message under way; what MessageWork asks for.

    Args:
        standing: of its group.
        carrier: where it was begun.
        transfer: what was begun.
        entry: what is kept of it.
        messages: where it is noted.
        partners: the ranks at the other end: one, or any of several.
        deadline: the operation's own.
        after: what to do once the data is there.
    """

    def __init__(
        self,
        standing: LocalGroupState,
        carrier: MessageTransport,
        transfer: Transfer,
        entry: Record,
        messages: MessageLog,
        partners: Sequence[int],
        deadline: Deadline,
        after: OnComplete,
    ) -> None:
        self.transfer = transfer
        self.deadline = deadline
        self._state = standing
        self._transport = carrier
        self._record = entry
        self._log = messages
        self._partners = partners
        self._on_complete = after
        messages.begin(entry, transfer)

    def complete(self, deadline: Deadline | None) -> bool:
        """Wait for the message until a deadline, or with None just look; return whether it is done, or raise."""
        try:
            done = self.transfer.done or self._await(deadline)
        except BaseException as error:
            # A wait shorter than the operation's own deadline may end without ending the operation.
            if deadline is self.deadline or not isinstance(error, CollectiveTimeoutError):
                self.abandon(error)
                self._log.end(self._record, error)
            raise
        if done:
            self._log.end(self._record, self.transfer.error)
            if self.transfer.error is not None:
                raise self.transfer.error
        if done and self._on_complete is not None:
            self._on_complete()
            self._on_complete = None
        return done

    def _await(self, deadline: Deadline | None) -> bool:
        standing, transfer = self._state, self.transfer
        if deadline is None:
            self._transport.progress()
        else:
            self._transport.wait(lambda: transfer.done or self._cannot_complete(), deadline)
        if transfer.done:
            return True
        standing.raise_if_failed()
        standing.raise_if_peer_lost(self._partners, describe(self._record), any_will_do=True)
        if deadline is None:
            return False
        raise standing.timeout_error(self._partners, describe(self._record), deadline, None)

    def _cannot_complete(self) -> bool:
        return self._state.cannot_complete(self._partners, any_will_do=True)

    def abandon(self, error: BaseException) -> None:
        """Undo a message that will not be waited for any longer; if its data is on the way, give the group up."""
        with self._state.mesh.lock:
            undone = self._transport.cancel(self.transfer)
            undone |= all(rank in self._state.mesh.lost_peers for rank in self._partners)
        if not undone:
            self._state.abort(error)
