"""Ends the process when a call of MPI cannot end.

Nothing interrupts a call that is in MPI: not a signal, not the end of the rank it waits for, not a deadline. So one
thread of the process looks, a few times a second, whether a call is in MPI that has lost a member, or is late, or is
not the others' call. Then it says so in the words that the mesh's errors have, tells the members over the mesh, and if
the call has not ended a moment later, ends the job with MPI_Abort.

Who is missing is known by roll calls over the mesh: a rank whose call takes long tells the others which it is in, and
those that have come as far, or further, say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rankmesh_agent.group.pending import ActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.messages import poll_orphaned
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistError
from rankmesh_agent.wire.ops import Call

POLL_SECONDS = 0.1
"""Between two looks."""
_LONG = 0.5
"""Seconds after which a call is told to the others."""
_PATIENCE = 0.5
"""Seconds that those have to answer whose call is late."""
_GRACE = 1.0
"""Seconds in which a call may yet end before the process is ended."""

_log = logging.getLogger("rankmesh")


class WatchedGroup:
    """One group's calls, as the guard looks at them.

    Args:
        standing: whether the group can go on.
        running: the call under way.
        link: messages among the members.
        backend: what makes the calls.
        progress: moves the group's messages.
    """

    def __init__(
        self,
        standing: LocalGroupState,
        running: ActiveCall,
        link: MessageLink,
        backend: MpiBackend,
        progress: Callable[[], None],
    ) -> None:
        self._standing = standing
        self._running = running
        self._link = link
        self._backend = backend
        self._progress = progress
        self._told = 0
        self._told_at = 0.0

    def check(self) -> None:
        """Look once."""
        standing, link = self._standing, self._link
        if standing.failure is None:
            try:
                self._progress()
            except DistError as failure:
                standing.abort(failure)
        standing.engine.progress()
        call, seq, begun, deadline = standing.call, standing.seq, standing.started_at, self._running.deadline.at
        if call is None or standing.engine.closed:
            return
        now = time.monotonic()
        under_way = begun is not None and self._backend.in_call and standing.seq == seq
        late = under_way and now > deadline
        asked = max((told.seq for told in link.progress.values() if told.seq <= seq), default=0)
        if self._told < (seq if late or (under_way and now - (begun or now) > _LONG) else asked):
            self.report_progress()
        if not under_way:
            return
        error = self._trouble(call, seq)
        if error is None and late and now > max(deadline, self._told_at) + _PATIENCE:
            error = self._late(call, seq)
        if error is not None:
            self._end(error, seq)

    def report_progress(self) -> None:
        """Tell the members how far this rank has come."""
        call, seq = self._standing.call, self._standing.seq
        if call is not None:
            self._told, self._told_at = seq, time.monotonic()
            self._link.report_progress(seq, call.fingerprint, str(call))

    def _missing(self, seq: int) -> list[int]:
        """Return the members that have not come to a call, by the mesh's numbers."""
        return [self._standing.ranks[member] for member in self._link.lagging(seq)]

    def _late(self, call: Call, seq: int) -> DistError:
        """Return the error of a call whose deadline passed. Ranks that are in other calls may be why."""
        standing = self._standing
        error = standing.timeout_error(self._missing(seq), f"{call.name} #{seq}", self._running.deadline, seq)
        elsewhere = [
            f"rank {standing.global_ranks[member]} has come to {told.description} #{told.seq}"
            for member, told in sorted(self._link.progress.items())
            if told.seq != seq
        ]
        if not elsewhere:
            return error
        message = f"{error.message}. This is {call} #{seq}; {'; '.join(elsewhere)}"
        return CollectiveTimeoutError(message, **error.details())

    def _trouble(self, call: Call, seq: int) -> DistError | None:
        """Return why the call under way cannot end."""
        standing = self._standing
        try:
            standing.raise_if_failed()
            standing.raise_if_peer_lost(self._missing(seq), f"{call.name} #{seq}")
        except DistError as error:
            return error
        others = {m: told for m, told in self._link.progress.items() if told.seq == seq}
        different = [m for m, told in others.items() if told.fingerprint != call.fingerprint]
        if not different:
            return None
        said = {self._link.rank: str(call), **{member: told.description for member, told in others.items()}}
        table = "; ".join(f"rank {standing.global_ranks[member]}: {words}" for member, words in sorted(said.items()))
        return CollectiveMismatchError(
            f"the ranks did not make the same call as #{seq} of group {standing.name!r}: {table}",
            ranks=[standing.global_ranks[member] for member in different],
            op=call.name,
            group=standing.name,
            seq=seq,
        )

    def _end(self, error: DistError, seq: int) -> None:
        """Say what is wrong, and end the process unless the call ends after all."""
        standing = self._standing
        _log.critical(
            "%s: %s. MPI lets nothing end this call but the end of the job: rank %d ends it",
            type(error).__name__,
            error.message,
            standing.global_rank(standing.engine.rank),
        )
        standing.abort(error)
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            if not self._backend.in_call or standing.seq != seq:
                return
            time.sleep(POLL_SECONDS / 10)
        mpi().COMM_WORLD.Abort(1)


class MpiWatchdog:
    """The thread that looks, while there are groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[WatchedGroup] = []
        self._thread: threading.Thread | None = None
        self._bell = threading.Event()

    def add(self, group: WatchedGroup) -> None:
        """Look at a group from now on."""
        with self._lock:
            self._groups.append(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="rankmesh-mpi-guard", daemon=True)
                self._thread.start()

    def remove(self, group: WatchedGroup) -> None:
        """Look at it no more."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
            thread = self._thread if not self._groups else None
        if thread is not None and thread is not threading.current_thread():
            self._bell.set()
            thread.join(_GRACE + 1)

    def wake(self) -> None:
        """Look at once."""
        self._bell.set()

    def _watch(self) -> None:
        while True:
            self._bell.wait(POLL_SECONDS)
            self._bell.clear()
            with self._lock:
                if not self._groups:
                    self._thread = None
                    return
                groups = list(self._groups)
            poll_orphaned()
            for group in groups:
                try:
                    group.check()
                except Exception:
                    _log.warning("the guard of MPI calls could not look at a group", exc_info=True)


WATCHDOG = MpiWatchdog()
"""The process's."""
