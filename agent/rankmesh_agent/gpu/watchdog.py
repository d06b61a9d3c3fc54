"""Watchdog of a group's calls in flight on GPUs: detects calls that cannot complete, and aborts the backend.

A kernel of NCCL waits on the GPU for the kernels of the other ranks, without a limit. The watchdog polls the calls in
flight; when the group fails, or a call passes its deadline, it aborts the backend. That ends the kernels, and the work
behind them on their streams goes on.
"""

from __future__ import annotations

import contextlib
import time

from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.nccl import NcclBackend
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.group.work import Future
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, DistError

_POLL_SECONDS = 0.005
_FUTURE_SECONDS = 0.0005
"""Interval of the checks while a future waits for one of them."""
_IDLE_SECONDS = 0.1
"""Interval of the checks without calls: to wake the thread for each call would take longer than the call."""
_CLOSE_SECONDS = 5.0


class GpuWatchdog:
    """Watches one group's calls on GPUs."""

    def __init__(self, comm: Communicator, backend: NcclBackend) -> None:
        self._comm = comm
        self._backend = backend
        self._launches: dict[Launch, None] = {}  # without a lock: each use of it is atomic
        self._watchdog = Watchdog(f"rankmesh-{comm.name}-gpu", _CLOSE_SECONDS)
        self._watchdog.add(self._check)

    def add(self, launch: Launch) -> None:
        """Watch a call that is being launched. All members launch collectives in the same order."""
        self._launches[launch] = None

    def remove(self, launch: Launch) -> None:
        """Stop watching a call that could not be launched. Does nothing if it is not watched."""
        self._launches.pop(launch, None)

    def future_of(self, launch: Launch) -> Future:
        """Return a future that completes, with value None, when a call has ended."""
        future = launch.request_future()
        if launch not in self._launches and launch.is_completed():
            launch.complete_future()
        else:
            self._watchdog.wake()
        return future

    def drain(self, deadline: Deadline) -> None:
        """Wait until all calls have ended or the deadline passes. The calls' own deadlines stay in force."""
        self._watchdog.wake()
        while self._launches and not deadline.expired():
            time.sleep(_POLL_SECONDS)
        failure = self._comm.failure
        if failure is not None:
            raise failure

    def close(self) -> bool:
        """End the thread; calls in flight are no longer watched. Return whether there are any."""
        self._watchdog.remove(self._check)
        return bool(self._launches)

    def _check(self) -> float:
        monitor = self._comm.launch_monitor
        if monitor is not None:
            monitor.progress()
        launches = list(self._launches)
        if not launches:
            return _IDLE_SECONDS
        try:
            failure = self._comm.failure
            self._find_completed(launches)
            if failure is None and self._launches:
                failure = self._error(list(self._launches))
                if failure is not None:
                    self._comm.abort(failure)
        except Exception as error:  # an error of CUDA's, after which the GPU is unusable, or a bug
            failure = error if isinstance(error, DistError) else DistBackendError(f"on the GPU: {error}")
            self._comm.abort(failure)
        if failure is not None:
            self._abort(failure)
        return _FUTURE_SECONDS if any(launch.future is not None for launch in launches) else _POLL_SECONDS

    def _find_completed(self, launches: list[Launch]) -> None:
        """Find the calls that the GPU has completed, and stop watching them."""
        latest = {(launch.device, launch.stream): launch for launch in launches if launch.seq}
        completed = {place: launch.seq for place, launch in latest.items() if launch.is_completed()}
        busy: set[tuple[int, int]] = set()
        for launch in launches:
            place = launch.device, launch.stream
            if 0 < launch.seq <= completed.get(place, 0):
                launch.complete()  # collectives are enqueued in order; to query each would take longer than it did
            elif place not in busy and not launch.is_completed():
                busy.add(place)  # what is behind it has not ended either
        self._forget_ended(launches)

    def _error(self, launches: list[Launch]) -> DistError | None:
        """Return why the calls in flight cannot complete, None while they can."""
        group, monitor = self._comm, self._comm.launch_monitor
        message = self._backend.async_error()
        if message:
            return DistBackendError(f"{launches[0].description} in group {group.name!r}: {message}")
        first = next((launch for launch in launches if launch.seq), launches[0])
        late = [launch for launch in launches if launch.deadline.expired()]
        for launch in (first, launches[0], *late):
            seq, description, deadline, peers = launch.seq, launch.description, launch.deadline, launch.peers
            if launch.is_completed():
                continue
            if monitor is not None:
                error = monitor.error(seq, launch.fingerprint, description, deadline, peers)
                if error is not None:
                    return error
            elif deadline.expired():
                return CollectiveTimeoutError(
                    f"{description} in group {group.name!r} waited {deadline.seconds:.1f} s on the GPU for "
                    f"{', '.join(f'rank {group.global_ranks[peer]}' for peer in peers)}",
                    ranks=[group.global_ranks[peer] for peer in peers],
                    op=launch.op,
                    group=group.name,
                )
        return None

    def _abort(self, error: DistError) -> None:
        with contextlib.suppress(Exception):  # the backend is not used again, whatever abort raises
            self._backend.abort()
        launches = list(self._launches)
        for launch in launches:
            launch.fail(error)
        self._forget_ended(launches)

    def _forget_ended(self, launches: list[Launch]) -> None:
        """Stop watching the calls that have ended, and complete their futures."""
        for launch in launches:
            if launch.ended:
                self.remove(launch)
                launch.complete_future()
