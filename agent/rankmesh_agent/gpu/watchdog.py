"""Watchdog of a group's calls in flight on GPUs: detects calls that cannot complete, and aborts the backend.

A kernel of NCCL waits on the GPU for the kernels of the other ranks, without a limit. The watchdog polls the calls in
flight; when the group fails, or a call passes its deadline, it aborts the backend. That ends the kernels, and the work
behind them on their streams goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from rankmesh_agent.backends.fingerprint import call_table
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.nccl import NcclBackend
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.group.work import Future
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, DistError

_POLL_SECONDS = 0.005
"""Interval of the checks while calls are in flight."""
_FUTURE_SECONDS = 0.0005
"""Interval of the checks while a future waits for one of them."""
_IDLE_SECONDS = 1.0
"""Time without calls until the checks pause: to wake the thread for each call would take longer than the call."""
_CLOSE_SECONDS = 5.0
"""Longest wait for the thread at the end; an abort may take long."""
_SLOW_SECONDS = 1.0
"""Age at which a rank reports that a call is in flight; at the timeout, a rank that has not done so is missing."""


class GpuWatchdog:
    """Watches one group's calls on GPUs.

    Args:
        comm: the group's communicator for host memory, which has the group's failure and global ranks.
        backend: runs the calls.
    """

    def __init__(self, comm: Communicator, backend: NcclBackend) -> None:
        self._comm = comm
        self._backend = backend
        self._launches: list[Launch] = []
        self._added: deque[Launch] = deque()  # without the lock: appending is atomic, and quick
        self._reported = 0
        self._changed = threading.Condition()
        self._idle_since = 0.0
        self._paused = False
        self._watchdog = Watchdog(f"rankmesh-{comm.name}-gpu", _CLOSE_SECONDS)
        self._started = False

    def add(self, launch: Launch) -> None:
        """Watch a call that is being launched. All members launch collectives in the same order."""
        self._added.append(launch)
        if self._paused or not self._started:
            self._start()

    def _start(self) -> None:
        """Start the checks, or go on with them."""
        with self._changed:
            self._paused = False
            if not self._started:
                self._started = True
                self._watchdog.add(self._check)
        self._watchdog.wake()

    def remove(self, launch: Launch) -> None:
        """Stop watching a call that could not be launched. Does nothing if it is not watched."""
        with self._changed:
            launches = self._in_flight()
            if launch in launches:
                launches.remove(launch)
                self._changed.notify_all()

    def _in_flight(self) -> list[Launch]:
        """Return the calls that are watched. With the lock held."""
        while self._added:
            self._launches.append(self._added.popleft())
        return self._launches

    def future_of(self, launch: Launch) -> Future:
        """Return a future that completes, with value None, when a call has ended."""
        with self._changed:
            if launch.future is not None:
                return launch.future
            launch.future = Future()
            completed = launch not in self._in_flight() and launch.is_completed()
        if completed:
            _complete(launch.future, launch)
        else:
            self._watchdog.wake()
        return launch.future

    def drain(self, deadline: Deadline) -> None:
        """Wait until all calls have ended or the deadline passes. The calls' own deadlines stay in force.

        Raises:
            DistError: a call failed.
        """
        with self._changed:
            while self._in_flight() and not deadline.expired():
                self._changed.wait(_POLL_SECONDS)
        failure = self._comm.failure
        if failure is not None:
            raise failure

    def close(self) -> bool:
        """End the thread; calls in flight are no longer watched. Return whether there are any."""
        self._watchdog.remove(self._check)
        with self._changed:
            return bool(self._in_flight())

    def _check(self) -> float | None:
        with self._changed:
            launches = self._in_flight().copy()
        if launches:
            try:
                self._check_launches(launches)
            except Exception as error:  # an error of CUDA's, after which the GPU is unusable, or a bug
                failure = error if isinstance(error, DistError) else DistBackendError(f"on the GPU: {error}")
                self._comm.abort(failure)
                self._abort(failure)
        now = time.monotonic()
        if launches:
            self._idle_since = now
        elif now - self._idle_since > _IDLE_SECONDS:
            self._paused = True
            if not (self._added or self._launches):  # else one was added that could not see the pause
                return None
            self._paused = False
        awaited = any(launch.future is not None for launch in self._launches)
        return _FUTURE_SECONDS if awaited else _POLL_SECONDS

    def _check_launches(self, launches: list[Launch]) -> None:
        error = self._comm.failure
        latest = {(launch.device, launch.stream): launch for launch in launches if launch.seq}
        completed = {place: launch.seq for place, launch in latest.items() if launch.is_completed()}
        busy: set[tuple[int, int]] = set()
        for launch in launches:
            place = launch.device, launch.stream
            if 0 < launch.seq <= completed.get(place, 0):
                launch.complete()  # collectives are enqueued in order; to query each would take longer than it did
            elif place not in busy and not launch.is_completed():
                busy.add(place)  # what is behind it has not ended either
        launches = self._forget_ended()
        if not launches and error is None:
            return
        now = time.monotonic()
        late = next((launch for launch in launches if now >= launch.deadline.at and not launch.is_completed()), None)
        if error is None:
            message = self._backend.async_error()
            if message:
                error = DistBackendError(f"{launches[0].description} in group {self._comm.name!r}: {message}")
            elif late is not None:
                error = self._timeout_error(late)
            else:
                self._report_if_slow()
                error = self._peer_lost_error(launches)
                if error is None:
                    return
            self._comm.abort(error)
        self._abort(error)

    def _abort(self, error: DistError) -> None:
        with contextlib.suppress(Exception):  # the backend is not used again, whatever abort raises
            self._backend.abort()
        with self._changed:
            launches = self._in_flight().copy()
        for launch in launches:
            launch.fail(error)
        self._forget_ended()

    def _forget_ended(self) -> list[Launch]:
        """Stop watching the calls that have ended, and complete their futures; return the others."""
        with self._changed:
            every = self._in_flight()
            left = self._launches = [launch for launch in every if not launch.ended]
            futures = [(launch.future, launch) for launch in every if launch.ended and launch.future is not None]
            if len(left) < len(every):
                self._changed.notify_all()
        for future, launch in futures:
            _complete(future, launch)
        return left.copy()

    def _peer_lost_error(self, launches: list[Launch]) -> DistError | None:
        """Return the error of a slow call that waits for a rank that has left, None if there is none."""
        for launch in launches:
            if launch.deadline.elapsed() > _SLOW_SECONDS and not launch.is_completed():
                return self._comm.peer_lost_error(launch.peers, launch.op)
        return None

    def _report_if_slow(self) -> None:
        """Report the oldest call in flight, once, if it is slow, and receive what other ranks report."""
        with self._changed:
            first = next((launch for launch in self._in_flight() if launch.seq), None)
        if first is None or first.deadline.elapsed() <= min(_SLOW_SECONDS, first.deadline.seconds / 2):
            return
        if first.seq > self._reported:
            self._reported = first.seq
            self._comm.report_launch(first.seq, first.fingerprint, first.description)
        self._comm.launches_of_others()

    def _timeout_error(self, launch: Launch) -> CollectiveTimeoutError:
        """Return the error of a call that passed its deadline. It names the ranks that have not reported the call."""
        seq, ranks, group = launch.seq, self._comm.global_ranks, self._comm.name
        reports = self._comm.launches_of_others()
        others = [rank for rank in launch.peers if rank not in reports or reports[rank].seq < seq]
        calls = {ranks[self._comm.rank]: launch.description}
        calls |= {ranks[rank]: report.text for rank, report in reports.items() if seq and report.seq == seq}
        message = (
            f"{launch.description} in group {group!r} did not end on the GPU within {launch.deadline.seconds:.1f} s"
        )
        if len(set(calls.values())) > 1:
            message += f"; the ranks did not make the same call: {call_table(calls)}"
        missing = [ranks[rank] for rank in others]
        if missing:
            message += f"; missing: {', '.join(f'rank {rank}' for rank in missing)}"
        return CollectiveTimeoutError(message, ranks=missing, op=launch.op, group=group)


def _complete(future: Future, launch: Launch) -> None:
    if launch.error is None:
        future.set_result(None)
    else:
        future.set_exception(launch.error)
