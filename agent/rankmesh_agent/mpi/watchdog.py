"""Watchdog of calls inside MPI: a thread that ends a call that cannot end by itself.

Such a call has lost a member, has passed its deadline, or differs from the calls of the other members. The watchdog
aborts the group at all members. With ULFM it revokes the communicator, which ends the call; without, nothing interrupts
the call, so the watchdog logs the error, and ends the job with MPI_Abort.

The missing ranks are known from reports over the group's message link: a rank whose call takes long reports its
sequence number, and every rank that has come as far, or further, reports back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rankmesh_agent.backends.fingerprint import call_table
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.state import START_UP
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.messages import MpiMessages, poll_orphaned
from rankmesh_agent.progress.status import Status
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistError
from rankmesh_agent.wire.ops import Call

POLL_SECONDS = 0.1
"""Interval of the checks."""
_REPORT_SECONDS = 0.5
"""Age at which a call is reported to the other members."""
_REPLY_SECONDS = 0.5
"""Time that the other members have to report back once a call is late."""
_GRACE_SECONDS = 1.0
"""Time that a call has to end by itself before the job is ended."""

_log = logging.getLogger("rankmesh")
WATCHDOG = Watchdog("rankmesh-mpi-watchdog", _GRACE_SECONDS + 1)
"""Runs the checks of all groups of the process."""


class CallWatchdog:
    """Watches one group's calls inside MPI, and progresses its messages.

    Attributes:
        in_call: whether a call is inside MPI.
        revoke: ends the call at all members, None if MPI cannot.
    """

    def __init__(self, group: LocalCommunicator, messages: MpiMessages, revoke: Callable[[], None] | None) -> None:
        self.in_call = False
        self.revoke = revoke
        self._state = group.state
        self._link = group.link
        self._messages = messages
        self._reported = group.state.seq  # what the set-up has reported needs no answer
        self._reported_at = 0.0

    def check(self) -> float:
        """Check once; see group.watchdog.Check."""
        poll_orphaned()
        state, link = self._state, self._link
        if state.failure is None:
            self._messages.progress()
        state.engine.progress()
        call, seq, started_at, deadline = state.call, state.seq, state.started_at, state.deadline.at
        if call is START_UP or state.engine.closed:
            return POLL_SECONDS
        now = time.monotonic()
        active = started_at is not None and self.in_call and state.seq == seq
        late = active and now > deadline
        with state.engine.lock:
            link.calls.share()
            reports, missing = link.calls.of_others(), [state.ranks[member] for member in link.calls.missing(seq)]
        peers_at = max((report.seq for report in reports.values() if report.seq <= seq), default=0)
        if self._reported < (seq if late or (active and now - (started_at or now) > _REPORT_SECONDS) else peers_at):
            self.report_progress()
        if active:
            error = self._error(call, seq, missing, reports)
            if error is None and late and now > max(deadline, self._reported_at) + _REPLY_SECONDS:
                error = self._timeout_error(call, seq, missing, reports)
            if error is not None:
                self._end(error, seq)
        return POLL_SECONDS

    def report_progress(self) -> None:
        """Report this rank's latest call to the other members."""
        call, seq = self._state.call, self._state.seq
        if call is not START_UP:
            self._reported, self._reported_at = seq, time.monotonic()
            with self._state.engine.lock:
                self._link.calls.report(seq, call.fingerprint, str(call))

    def _timeout_error(self, call: Call, seq: int, missing: list[int], reports: dict[int, Status]) -> DistError:
        """Return the error of a call that passed its deadline, with the calls of members that are in other ones."""
        state = self._state
        error = state.timeout_error(missing, f"{call.name} #{seq}", state.deadline, seq)
        others = [
            f"rank {state.global_ranks[member]} has come to {report.text} #{report.seq}"
            for member, report in sorted(reports.items())
            if report.seq != seq
        ]
        if not others:
            return error
        message = f"{error.message}. This is {call} #{seq}; {'; '.join(others)}"
        return CollectiveTimeoutError(message, **error.details())

    def _error(self, call: Call, seq: int, missing: list[int], reports: dict[int, Status]) -> DistError | None:
        """Return why the active call cannot complete, None if it can."""
        state = self._state
        try:
            state.raise_if_failed()
            state.raise_if_peer_lost(missing, f"{call.name} #{seq}")
        except DistError as error:
            return error
        reports = {member: report for member, report in reports.items() if report.seq == seq}
        different = [member for member, report in reports.items() if report.fingerprint != call.fingerprint]
        if not different:
            return None
        calls = {self._link.rank: str(call), **{member: report.text for member, report in reports.items()}}
        table = call_table({state.global_ranks[member]: calls[member] for member in sorted(calls)})
        return CollectiveMismatchError(
            f"the ranks did not make the same call as #{seq} of group {state.name!r}: {table}",
            ranks=[state.global_ranks[member] for member in different],
            op=call.name,
            group=state.name,
            seq=seq,
        )

    def _end(self, error: DistError, seq: int) -> None:
        """Abort the group because of an error, and end the call: by MPI, else with the job, and log the error then."""
        state = self._state
        if self.revoke is not None:
            state.abort(error)
            self.revoke()
            return
        _log.critical(
            "%s: %s. MPI lets nothing end this call but the end of the job: rank %d ends it",
            type(error).__name__,
            error.message,
            state.global_rank(state.engine.rank),
        )
        state.abort(error)
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            if not self.in_call or state.seq != seq:
                return
            time.sleep(POLL_SECONDS / 10)
        mpi().COMM_WORLD.Abort(1)
