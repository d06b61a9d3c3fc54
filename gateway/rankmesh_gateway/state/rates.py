"""How much a rank's groups do, from one heartbeat to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.wire.schemas import GroupInfo

_SHORTEST_SECONDS = 0.5
"""Heartbeats that follow each other more closely, as the second one had something urgent to say, give no rate."""


class Rate(NamedTuple):
    """What happens in a second."""

    operations: float
    bytes: float


class Rates:
    """The rates of one rank's groups."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._counts: dict[str, tuple[int, int]] = {}
        self._rates: dict[str, Rate] = {}

    def update(self, groups: Sequence[GroupInfo], now: float) -> None:
        """Take in what a heartbeat says."""
        if self._at is not None and now - self._at < _SHORTEST_SECONDS:
            return
        counts = {group.id: (group.seq, group.bytes) for group in groups}
        if self._at is not None:
            seconds = now - self._at
            self._rates = {
                group: Rate(
                    max(0, seq - self._counts[group][0]) / seconds, max(0, nbytes - self._counts[group][1]) / seconds
                )
                for group, (seq, nbytes) in counts.items()
                if group in self._counts
            }
        self._at, self._counts = now, counts

    def of(self, group: str) -> Rate:
        """The rate of a group, by its id; nothing at its first heartbeat."""
        return self._rates.get(group, Rate(0.0, 0.0))
