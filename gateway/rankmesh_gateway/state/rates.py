"""Throughput of a rank's groups, from one heartbeat to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.wire.schemas import GroupInfo

_MIN_INTERVAL = 0.5
"""Seconds. Heartbeats closer together, where the second one was urgent, give no rate."""


class Rate(NamedTuple):
    """Operations and bytes a second."""

    operations: float
    bytes: float


class Rates:
    """The rates of one rank's groups."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._counts: dict[str, tuple[int, int]] = {}
        self._rates: dict[str, Rate] = {}

    def update(self, groups: Sequence[GroupInfo], now: float) -> None:
        """Record the counts of a heartbeat."""
        if self._at is not None and now - self._at < _MIN_INTERVAL:
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
        """Return the rate of a group, by its id; zero at its first heartbeat."""
        return self._rates.get(group, Rate(0.0, 0.0))
