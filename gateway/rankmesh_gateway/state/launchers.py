"""Launchers of jobs on several nodes: the attempt that each job is at, and what its nodes report of that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    STARTING,
    SUSPECT_SECONDS,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)
from rankmesh_gateway.state.validation import MAX_JOBS, GatewayFullError, check_launcher


@dataclass
class _Launcher:
    """The launcher of one node.

    Attributes:
        instance: random name of its process.
        attempt, state: as it last reported.
        last_seen: the clock at that.
        knows_end: whether it has received that the job is over.
    """

    instance: str
    attempt: int
    state: LauncherState
    last_seen: float
    knows_end: bool = False


class RendezvousState:
    """The launchers of one job, which agree on its restarts.

    The first failure of an attempt begins the next one, for all nodes. A node whose launcher is replaced has failed,
    too: its ranks have ended with it.

    Args:
        nodes: nodes of the job.

    Attributes:
        attempt: how often the job has been restarted.
        over: whether it will not be restarted any more.
    """

    def __init__(self, nodes: int) -> None:
        self.attempt = 0
        self.over = False
        self._nodes = nodes
        self._launchers: dict[int, _Launcher] = {}
        self._first_end: float | None = None

    def heartbeat(self, beat: LauncherHeartbeat, now: float) -> LauncherReply:
        """Record a heartbeat and return the state of the job."""
        if beat.attempt > self.attempt:  # the gateway is younger than the launcher
            self._begin(beat.attempt)
        replaced = self._replaces(beat)
        current = beat.attempt == self.attempt
        if replaced or (current and beat.state == "failed"):
            if self.attempt < beat.max_restarts and not self.over:
                self._begin(self.attempt + 1)
            elif not replaced:
                self.over = True
        elif beat.state == "stopped":
            self.over = True
        elif current and beat.state == "ended" and self._first_end is None:
            self._first_end = now
        launcher = self._launchers[beat.node] = _Launcher(beat.instance, beat.attempt, beat.state, now)
        self.over = self.over or all(self._has_ended(node, now) for node in range(self._nodes))
        launcher.knows_end = self.over
        return LauncherReply(self.attempt, self.over)

    def all_know_end(self, now: float) -> bool:
        """Return whether each launcher that is not silent has received that the job is over."""
        return all(each.knows_end or now - each.last_seen > SUSPECT_SECONDS for each in self._launchers.values())

    def last_seen(self) -> float:
        """Return the clock at the last heartbeat of any launcher."""
        return max((each.last_seen for each in self._launchers.values()), default=float("-inf"))

    def _begin(self, attempt: int) -> None:
        self.attempt = attempt
        self._first_end = None

    def _replaces(self, beat: LauncherHeartbeat) -> bool:
        known = self._launchers.get(beat.node)
        if known is None or known.instance == beat.instance or beat.attempt != STARTING:
            return False
        return known.attempt == self.attempt and known.state == "running"

    def _has_ended(self, node: int, now: float) -> bool:
        """Return whether the ranks of a node have ended, or its launcher is silent while other nodes have ended."""
        if self._first_end is None:
            return False
        launcher = self._launchers.get(node)
        if launcher is not None and launcher.attempt == self.attempt and launcher.state == "ended":
            return True
        seen = self._first_end if launcher is None else max(self._first_end, launcher.last_seen)
        return now - seen >= FAILED_SECONDS


class LauncherRegistry:
    """The launchers of all jobs of a gateway. Thread-safe, under the lock of its registry.

    Args:
        clock: the registry's clock; called with the lock held.
        lock: the registry's lock.
    """

    def __init__(self, clock: Callable[[], float], lock: threading.Lock) -> None:
        self._clock = clock
        self._lock = lock
        self._jobs: dict[str, RendezvousState] = {}

    def heartbeat(self, beat: LauncherHeartbeat) -> LauncherReply:
        """Record a launcher's heartbeat.

        Returns:
            The attempt that the job is at, and whether it will not be restarted any more.

        Raises:
            InvalidRequestError: a value of the heartbeat is invalid.
            GatewayFullError: the job is new and there are MAX_JOBS with live launchers.
        """
        check_launcher(beat)
        with self._lock:
            now = self._clock()
            if beat.job not in self._jobs:
                self._make_room(now)
                self._jobs[beat.job] = RendezvousState(beat.nodes)
            return self._jobs[beat.job].heartbeat(beat, now)

    def all_know_end(self, job: str) -> bool:
        """Return whether each live launcher of a job has received that the job is over."""
        with self._lock:
            return job not in self._jobs or self._jobs[job].all_know_end(self._clock())

    def _make_room(self, now: float) -> None:
        if len(self._jobs) < MAX_JOBS:
            return
        oldest = min(self._jobs, key=lambda name: self._jobs[name].last_seen())
        if now - self._jobs[oldest].last_seen() < FAILED_SECONDS:
            raise GatewayFullError(f"this gateway keeps the launchers of {MAX_JOBS} jobs and all are live")
        del self._jobs[oldest]
