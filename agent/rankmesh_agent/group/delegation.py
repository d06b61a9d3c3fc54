"""Agent side of delegated collectives: an attached process runs them in shared memory; the agent checks its peers.

A process that is attached to an agent on its own host maps the segment that the group's members share, and executes
the rank's collectives itself. The agent keeps the connections: it knows which peers are lost, carries the messages by
which the ranks compare their calls, and mirrors the calls that the process reports.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rankmesh_agent.group.flight_recorder import Record
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.stats import OpStats


class CallReport(NamedTuple):
    """A report of the attached process on its calls in a group.

    Attributes:
        call: its latest call.
        seq: the call's number.
        op_stats: statistics of all its calls, by operation.
        active: its calls that have not ended, each with its number, begin and bytes.
        ended: those that have ended since the last report, each with its number, begin, end, error and bytes.
    """

    call: Call
    seq: int
    op_stats: dict[str, OpStats]
    active: list[tuple[Call, int, float, int]]
    ended: list[tuple[Call, int, float, float, str, int]]


class DelegatedCalls:
    """The agent's part in the calls of one group that an attached process executes.

    Args:
        state: failure state of the group.
        link: messages among the members.
    """

    def __init__(self, state: LocalGroupState, link: MessageLink) -> None:
        self._state = state
        self._link = link
        self._turn = threading.Lock()
        self._report: CallReport | None = None

    def check_peers(self, call: Call, seq: int, missing: list[int], seconds: float, left: float) -> None:
        """Check whether a call can go on, as ``CallContext.check`` does.

        Args:
            call: the call.
            seq: its number.
            missing: the group ranks that it waits for.
            seconds: how long it may take.
            left: how much of that is left.
        """
        with self._call(call, seq, seconds):
            self._state.deadline.at -= seconds - left
            self._state.check(lambda: missing)

    def verify(self, call: Call, seq: int, fingerprint: int, seconds: float) -> None:
        """Wait until all members have arrived at a call, over messages.

        Raises:
            CallMismatchError: they made different calls.
        """
        with self._call(call, seq, seconds):
            self._link.begin(seq, fingerprint, self._state.wait)
            self._link.arrive()

    def exchange_descriptions(self, call: Call, seq: int, seconds: float, description: bytes) -> list[bytes]:
        """After a mismatch, send ``description`` to all members and return theirs."""
        with self._call(call, seq, seconds):
            self._link.begin(seq, 0, self._state.wait)
            return [bytes(payload) for payload in self._link.exchange_descriptions(description)]

    def abort(self, call: Call | None, seq: int, busy: bool, error: BaseException) -> DistError | None:
        """End the group at all members because of an error in the attached process; return the failure.

        Args:
            call: the latest call there, None if there was none.
            seq: the call's number.
            busy: whether it is under way.
            error: the error.
        """
        state = self._state
        if call is not None:
            state.call, state.seq = call, seq
            state.started_at = state.deadline.started if busy else None
        state.abort(error)
        if call is not None:
            state.started_at = None
        return state.failure

    def update(self, report: CallReport) -> None:
        """Mirror the calls of a report in the group's state and in the flight recorder."""
        state = self._state
        if state.failure is None and report.seq > state.seq:
            state.call, state.seq = report.call, report.seq
        self._report = report
        for call, seq, started, ended, error, nbytes in report.ended:
            state.recorder.record((state, call, seq, started, ended, error, nbytes))

    def active_records(self) -> list[Record]:
        """Return the calls that have not ended, as of the last report."""
        active = [] if self._report is None else self._report.active
        return [(self._state, call, seq, started, None, "", nbytes) for call, seq, started, nbytes in active]

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the statistics, by operation, as of the last report."""
        return {} if self._report is None else self._report.op_stats

    @contextlib.contextmanager
    def _call(self, call: Call, seq: int, seconds: float) -> Iterator[None]:
        """Wait for this thread's turn; have the call under way in the block."""
        state = self._state
        with self._turn:
            state.call, state.seq, state.nbytes = call, seq, call.nbytes
            state.deadline.restart(seconds)
            state.started_at = state.deadline.started
            state.rename_lost_call()
            try:
                yield
            finally:
                state.started_at = None
