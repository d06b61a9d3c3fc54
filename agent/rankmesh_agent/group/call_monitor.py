"""Monitor of calls that no thread checks while they wait, in MPI or on a GPU: finds those that cannot complete."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rankmesh_agent.backends.fingerprint import call_table
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.state import START_UP
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.status import CallTable
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistError

_INTERVAL = 0.05
_REPORT_SECONDS = 0.5
"""Age at which a call is reported to the other members; half of its time limit, if that is less."""
_REPLY_SECONDS = 0.5


class CallMonitor:
    """Reports the calls of this rank that take long, and finds out from the other members' reports what is wrong.

    Every rank that has come as far as a reported call, or further, replies: the others are missing.
    """

    def __init__(self, state: LocalGroupState, calls: CallTable) -> None:
        self._state = state
        self._calls = calls
        self._reported = state.seq  # what the set-up has reported needs no answer
        self._reported_at = 0.0
        self._next = 0.0

    def progress(self) -> None:
        """Receive the other members' reports; reply if they do not know that this rank has come as far."""
        state, now = self._state, time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        state.engine.progress()
        seq = state.seq
        with state.engine.lock:
            self._calls.share()
            reports = self._calls.of_others().values()
        if any(self._reported < report.seq <= seq for report in reports):
            self.report_latest()

    def report_latest(self) -> None:
        """Report this rank's latest call to the other members."""
        call, seq = self._state.call, self._state.seq
        if call is not START_UP:
            self._report(seq, call.fingerprint, str(call))

    def _report(self, seq: int, fingerprint: int, description: str) -> None:
        self._reported, self._reported_at = seq, time.monotonic()
        with self._state.engine.lock:
            self._calls.report(seq, fingerprint, description)

    def error(
        self, seq: int, fingerprint: int, description: str, deadline: Deadline, peers: Sequence[int] | None = None
    ) -> DistError | None:
        """Return why a call in flight cannot complete, None while it can. Reports the call if it takes long.

        Args:
            seq: number of the collective, 0 for a message.
            description: of the call, as all ranks describe it.
            peers: the members whose loss ends the call; by default those that have not come to it.
        """
        state = self._state
        if state.failure is not None:
            return state.failure
        if deadline.elapsed() < min(_REPORT_SECONDS, deadline.seconds / 2):
            return None
        if self._reported < seq:
            self._report(seq, fingerprint, description)
        with state.engine.lock:
            reports = self._calls.of_others()
            missing = self._calls.missing(seq) if seq else peers or ()
        waiting_for = [state.ranks[member] for member in missing]
        during = f"{description.partition('(')[0]} #{seq}" if seq else description
        try:
            state.raise_if_peer_lost(waiting_for if peers is None else [state.ranks[peer] for peer in peers], during)
        except DistError as error:
            return error
        same = {member: report for member, report in reports.items() if seq and report.seq == seq}
        different = [member for member, report in same.items() if report.fingerprint != fingerprint]
        if different:
            calls = {state.ranks.index(state.engine.rank): description}
            calls |= {member: report.text for member, report in same.items()}
            table = call_table({state.global_ranks[member]: calls[member] for member in sorted(calls)})
            return CollectiveMismatchError(
                f"the ranks did not make the same call as #{seq} of group {state.name!r}: {table}",
                ranks=[state.global_ranks[member] for member in different],
                op=description.partition("(")[0],
                group=state.name,
                seq=seq,
            )
        if time.monotonic() < max(deadline.at, self._reported_at + _REPLY_SECONDS):
            return None
        late = state.timeout_error(waiting_for, during, deadline, seq or None)
        others = [
            f"rank {state.global_ranks[member]} has come to {report.text} #{report.seq}"
            for member, report in sorted(reports.items())
            if seq and report.seq not in (0, seq)  # 0: the start of the group, which is no call
        ]
        if not others:
            return late
        message = f"{late.message}. This is {description} #{seq}; {'; '.join(others)}"
        return CollectiveTimeoutError(message, **late.details())
