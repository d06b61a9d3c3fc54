"""Registry of the launchers of all jobs on several nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankmesh_agent.wire.schemas import FAILED_SECONDS, STARTING, LauncherHeartbeat, LauncherReply
from rankmesh_gateway.state.rendezvous import NodeChange, RendezvousState
from rankmesh_gateway.state.validation import MAX_JOBS, GatewayFullError, check_launcher


class LauncherRegistry:
    """The launchers of all jobs of a gateway. Thread-safe, under the lock of its registry."""

    def __init__(self, clock: Callable[[], float], lock: threading.Lock) -> None:
        self._clock = clock
        self._lock = lock
        self._jobs: dict[str, RendezvousState] = {}

    def heartbeat(self, beat: LauncherHeartbeat) -> LauncherReply:
        """Record a heartbeat; return the job's attempt, this node's place, and whether no other one can follow."""
        check_launcher(beat)
        with self._lock:
            now = self._clock()
            job = self._jobs.get(beat.job)
            if job is None:
                self._make_room(now)
                job = self._jobs[beat.job] = RendezvousState(beat)
            elif job.over and beat.attempt == STARTING and job.all_know_end(now) and not job.knows(beat.instance):
                job = self._jobs[beat.job] = RendezvousState(beat, job.attempt + 1)  # the job's next run
            return job.heartbeat(beat, now)

    def all_know_end(self, job: str) -> bool:
        """Return whether each live launcher of a job has received that the job is over."""
        with self._lock:
            return job not in self._jobs or self._jobs[job].all_know_end(self._clock())

    def change_after(self, job: str, attempt: int, now: float) -> NodeChange | None:
        """Return the change of a job's nodes that has ended an attempt. With the lock held.

        None before all launchers know it: else a rank's end because of the change would be a failure for its launcher.
        None of torchruns: they end the ranks, which do not know their attempt.
        """
        state = self._jobs.get(job)
        if state is None or state.change is None or state.store or not state.all_know(now):
            return None
        return state.change if state.attempt > attempt or state.over else None

    def reason(self, job: str, attempt: int) -> str:
        """Return why an attempt has begun, empty if that is not known. With the lock held."""
        state = self._jobs.get(job)
        return state.reason if state is not None and state.attempt == attempt else ""

    def stores(self) -> dict[str, str]:
        """Return the jobs whose live launchers share a store, by its id. With the lock held."""
        silent = self._clock() - FAILED_SECONDS
        return {state.store: job for job, state in self._jobs.items() if state.store and state.last_seen() > silent}

    def excuse(self, seconds: float) -> None:
        """Take some seconds off the silence of all launchers. With the lock held."""
        for job in self._jobs.values():
            job.excuse(seconds)

    def _make_room(self, now: float) -> None:
        if len(self._jobs) < MAX_JOBS:
            return
        oldest = min(self._jobs, key=lambda name: self._jobs[name].last_seen())
        if now - self._jobs[oldest].last_seen() < FAILED_SECONDS:
            raise GatewayFullError(f"this gateway keeps the launchers of {MAX_JOBS} jobs and all are live")
        del self._jobs[oldest]
