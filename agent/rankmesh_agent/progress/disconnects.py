"""Monitor of disconnects: detects peers that are gone without a GOODBYE at once, also between calls.

The progress engine detects a disconnect only during a wait or at the start of a call; a rank that computes for a minute
does neither. This monitor has the kernel report the end of the same connections. It reads nothing itself.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.progress_thread import SLICE_SECONDS
from rankmesh_agent.wire.schemas import LostRank

_UNREAD_SECONDS = 0.3
"""Seconds that a GOODBYE of a peer whose connection has ended may stay unread, behind messages without a receiver yet.
A peer that left in order has reported it to the gateway by then."""
_READ_SECONDS = 0.02
"""Interval of the attempts to read the end of a connection: a thread that drives the engine may stop just before it."""
_NEVER = float("inf")


class DisconnectMonitor:
    """Detects peers that are gone.

    Args:
        engine: the progress engine.
        waits_elsewhere: returns whether a thread waits for other ranks in a call that does not drive the engine: then
            this monitor does, now and then, for failures that they report and questions that they ask.
    """

    def __init__(self, engine: ProgressEngine, waits_elsewhere: Callable[[], bool] = lambda: False) -> None:
        self._engine = engine
        self._waits_elsewhere = waits_elsewhere
        self._ended: dict[int, float] = {}
        self._reported: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._poll = select.epoll()
        with engine.lock:
            for fd, rank in engine.descriptors().items():
                self._watch(rank, fd)
            engine.on_connected = self._watch

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection has ended."""
        return self._poll.fileno()

    def poll(self) -> bool:
        """Return whether a peer has failed that ``failed_peers`` has not reported."""
        with self._engine.lock:  # a descriptor that is closed may become that of another rank
            ended = {self._ranks[fd] for fd, _ in self._poll.poll(0)} - self._ended.keys()
        self._ended |= dict.fromkeys(ended, time.monotonic())
        if self._ended.keys() - self._engine.lost_peers.keys() or self._waits_elsewhere():
            self._engine.progress()  # a GOODBYE may have arrived
        return any(lost.rank not in self._reported for lost in self._find())

    def next_check(self) -> float:
        """Return the seconds until ``poll`` has to be called even if the descriptor is not readable."""
        known = self._reported | self._engine.lost_peers.keys()
        waiting = [since for rank, since in list(self._ended.items()) if rank not in known]
        if waiting:
            return min(max(0.0, min(waiting) + _UNREAD_SECONDS - time.monotonic()), _READ_SECONDS)
        return SLICE_SECONDS if self._waits_elsewhere() else _NEVER

    def failed_peers(self) -> list[LostRank]:
        """Return the peers that are gone without a GOODBYE, by rank."""
        found = self._find()
        self._reported |= {lost.rank for lost in found}
        return found

    def ended_peers(self) -> list[int]:
        """Return the peers whose connections ended some time ago, also those whose last bytes have not been read."""
        before = time.monotonic() - _UNREAD_SECONDS
        return [rank for rank, since in list(self._ended.items()) if since <= before]

    def close(self) -> None:
        """Close the descriptor."""
        with self._engine.lock:  # no connection is being added
            self._engine.on_connected = None
            self._poll.close()

    def _watch(self, rank: int, fd: int) -> None:
        self._ranks[fd] = rank
        self._poll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def _find(self) -> list[LostRank]:
        lost_peers = dict(self._engine.lost_peers)
        found = {rank: lost.reason for rank, lost in lost_peers.items() if lost.died}
        before = time.monotonic() - _UNREAD_SECONDS
        for rank, since in list(self._ended.items()):
            if rank not in lost_peers and since <= before:
                found[rank] = "its connection has ended, and its last bytes have not been read yet"
        return [LostRank(rank, cause) for rank, cause in sorted(found.items())]
