"""The peers of a progress engine."""

from __future__ import annotations

from collections.abc import Callable

from rankmesh_agent.progress.framing import FramedConnection
from rankmesh_agent.transports.base import Unconnected

UNCONNECTED = Unconnected()


class Peers(dict[int, FramedConnection]):
    """The peers by rank; one that is looked up and not connected yet is dialled.

    Args:
        dial: asks for a connection to a rank.
        eager_limit: see FramedConnection.
    """

    def __init__(self, dial: Callable[[int], object], eager_limit: int) -> None:
        super().__init__()
        self._dial = dial
        self._eager_limit = eager_limit

    def __missing__(self, rank: int) -> FramedConnection:
        self._dial(rank)
        peer = self[rank] = FramedConnection(rank, UNCONNECTED, self._eager_limit)
        return peer
