"""Watchdog of calls inside MPI: a thread that ends a call that cannot end by itself.

The watchdog aborts the group at all members. With ULFM it revokes the communicator, which ends the call; without,
nothing interrupts the call, so the watchdog logs the error, and ends the job with MPI_Abort.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rankmesh_agent.group.call_monitor import CallMonitor
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.messages import MpiMessages, poll_orphaned
from rankmesh_agent.wire.errors import DistError

POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0
"""Time that a call has to end by itself before the job is ended."""

_log = logging.getLogger("rankmesh")
WATCHDOG = Watchdog("rankmesh-mpi-watchdog", _GRACE_SECONDS + 1)


class CallWatchdog:
    """Watches one group's calls inside MPI, and progresses its messages.

    Attributes:
        in_call: whether a call is inside MPI.
        revoke: ends the call at all members, None if MPI cannot.
    """

    def __init__(self, group: LocalCommunicator, messages: MpiMessages, revoke: Callable[[], None] | None) -> None:
        self.in_call = False
        self.revoke = revoke
        self.monitor = CallMonitor(group.state, group.link.calls)
        self._state = group.state
        self._messages = messages

    def check(self) -> float:
        """Check once; see group.watchdog.Check."""
        poll_orphaned()
        state = self._state
        if state.failure is None:
            self._messages.progress()
        call, seq, started_at = state.call, state.seq, state.started_at
        if not state.engine.closed:
            self.monitor.progress()
            if started_at is not None and self.in_call and state.seq == seq:
                error = self.monitor.error(seq, call.fingerprint, str(call), state.deadline)
                if error is not None and self.in_call and state.seq == seq:
                    self._end(error, seq)
        return POLL_SECONDS

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
