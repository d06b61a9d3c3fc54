"""Calls and messages under way: how each waits until it is done, cannot complete, or its deadline passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from rankmesh_agent.backends.base import MessageTransport
from rankmesh_agent.group.flight_recorder import MessageLog, Record, describe
from rankmesh_agent.group.state import GroupState, LocalGroupState
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ops import Call

OnComplete = Callable[[], None] | None
"""Called once the data is there, to copy a staged array back, for example."""
Details = Callable[[], str] | None
"""Returns what a mismatch error adds to a rank's call: splits, shapes, call site."""


class ActiveCall(ABC):
    """The collective call under way in a group, one after the other: a ``backends.base.CallContext``.

    Args:
        state: failure state of the group.

    Attributes:
        call: the latest call.
        seq: its number.
        deadline: its deadline.
        details: see Options.
    """

    call: Call
    seq: int

    def __init__(self, state: GroupState) -> None:
        self.deadline = Deadline(0)
        self.details: Details = None
        self._state = state

    def begin(self, call: Call, seq: int, seconds: float) -> None:
        """Begin another call.

        Args:
            call: the call.
            seq: its number.
            seconds: how long it may take.
        """
        state = self._state
        self.call = state.call = call
        self.seq = state.seq = seq
        state.nbytes = call.nbytes
        self.details = None
        self.deadline.restart(seconds)
        state.started_at = self.deadline.started

    @property
    def global_ranks(self) -> Sequence[int]:
        """See CallContext."""
        return self._state.global_ranks

    def describe(self) -> str:
        """See CallContext."""
        return "" if self.details is None else self.details()

    @abstractmethod
    def check(self, missing: Callable[[], list[int]]) -> None:
        """See CallContext."""

    @abstractmethod
    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See CallContext."""


class LocalActiveCall(ActiveCall):
    """The call under way in a group whose messages this process's progress engine moves.

    Args:
        state: failure state of the group.
    """

    _state: LocalGroupState

    def __init__(self, state: LocalGroupState) -> None:
        super().__init__(state)

    def check(self, missing: Callable[[], list[int]]) -> None:
        """See CallContext."""
        state = self._state
        state.engine.progress()
        state.raise_if_failed()
        if state.engine.closed:
            raise GroupAbortedError("this process has left the job")
        waiting_for = [state.ranks[member] for member in missing()]
        if not waiting_for:
            return  # the last one came meanwhile, and may have left since
        during = f"{self.call.name} #{self.seq}"
        state.raise_if_peer_lost(waiting_for, during)
        if self.deadline.expired():
            raise state.timeout_error(waiting_for, during, self.deadline, self.seq)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See CallContext."""
        state = self._state
        engine = state.engine

        def settled() -> bool:
            if ready():
                return True
            if state.failure is None and not engine.lost_peers:
                return False
            return state.cannot_complete([state.ranks[member] for member in missing()])

        while True:
            engine.wait(settled, self.deadline)
            with engine.lock:
                if ready():
                    return
            self.check(missing)


class PendingMessage:
    """A point-to-point message under way.

    Args:
        state: failure state of its group.
        transport: carries the message.
        transfer: the transfer that has begun.
        record: the message as the flight recorder keeps it.
        log: counts the message and records its end.
        partners: the ranks at the other end: one, or any of several.
        deadline: the operation's own.
        on_complete: see Options.
    """

    def __init__(
        self,
        state: LocalGroupState,
        transport: MessageTransport,
        transfer: Transfer,
        record: Record,
        log: MessageLog,
        partners: Sequence[int],
        deadline: Deadline,
        on_complete: OnComplete,
    ) -> None:
        self.transfer = transfer
        self.deadline = deadline
        self._state = state
        self._transport = transport
        self._record = record
        self._log = log
        self._partners = partners
        self._on_complete = on_complete
        log.begin(record, transfer)

    def complete(self, deadline: Deadline | None) -> bool:
        """Wait for the message until a deadline, or with None only look; return whether it is done, or raise."""
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
        state, transfer = self._state, self.transfer
        if deadline is None:
            self._transport.progress()
        else:
            self._transport.wait(lambda: transfer.done or self._cannot_complete(), deadline)
        if transfer.done:
            return True
        state.raise_if_failed()
        state.raise_if_peer_lost(self._partners, describe(self._record), any_will_do=True)
        if deadline is None:
            return False
        raise state.timeout_error(self._partners, describe(self._record), deadline, None)

    def _cannot_complete(self) -> bool:
        return self._state.cannot_complete(self._partners, any_will_do=True)

    def abandon(self, error: BaseException) -> None:
        """Undo a message that no thread will wait for; if its data is on the way, end the group."""
        with self._state.engine.lock:
            undone = self._transport.cancel(self.transfer)
            undone |= all(rank in self._state.engine.lost_peers for rank in self._partners)
        if not undone:
            self._state.abort(error)
