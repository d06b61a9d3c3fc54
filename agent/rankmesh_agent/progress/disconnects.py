"""Which peers are gone without a goodbye, known at once, also while nobody calls.

The mesh finds out when somebody waits or begins a call; a rank that computes for a minute does neither. So the kernel
is asked to tell of one thing more about the same connections, that the other side has ended: nothing polls, and nothing
is read here but what the mesh reads, when that happens.
"""

from __future__ import annotations

import select
import time

from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.schemas import LostRank

_UNREAD_SECONDS = 0.3
"""How long a peer whose connection has ended may have left us in order: what it said last may have to wait behind
messages that nobody here takes yet. One that left in order has told the gateway by then."""
_NEVER = float("inf")


class DisconnectMonitor:
    """Looks out for peers that are gone.

    Args:
        mesh: the connections to them.
    """

    def __init__(self, mesh: ProgressEngine) -> None:
        self._mesh = mesh
        self._ended: dict[int, float] = {}
        self._told: set[int] = set()
        self._ranks = mesh.descriptors()
        self._poll = select.epoll()
        for fd in self._ranks:
            self._poll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection has ended."""
        return self._poll.fileno()

    def poll(self) -> bool:
        """Return whether a peer is gone that ``lost`` has not told of."""
        ended = {self._ranks[fd] for fd, _ in self._poll.poll(0)} - self._ended.keys()
        if ended:
            now = time.monotonic()
            self._ended |= dict.fromkeys(ended, now)
            self._mesh.progress()  # perhaps it has said goodbye
        return any(lost.rank not in self._told for lost in self._find())

    def next_check(self) -> float:
        """Return in how many seconds a connection that has ended will have done so for long enough."""
        known = self._told | self._mesh.lost_peers.keys()
        waiting = [since for rank, since in list(self._ended.items()) if rank not in known]
        return max(0.0, min(waiting) + _UNREAD_SECONDS - time.monotonic()) if waiting else _NEVER

    def failed_peers(self) -> list[LostRank]:
        """Return the peers that are gone without a goodbye, by rank."""
        found = self._find()
        self._told |= {lost.rank for lost in found}
        return found

    def close(self) -> None:
        """Let go of the descriptor."""
        self._poll.close()

    def _find(self) -> list[LostRank]:
        said = dict(self._mesh.lost_peers)
        found = {rank: lost.cause for rank, lost in said.items() if not lost.clean}
        before = time.monotonic() - _UNREAD_SECONDS
        for rank, since in list(self._ended.items()):
            if rank not in said and since <= before:
                found[rank] = "its connection has ended, and nobody has read yet what it sent last"
        return [LostRank(rank, cause) for rank, cause in sorted(found.items())]
