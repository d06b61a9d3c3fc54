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
        self._at = float("-inf")
        self._counts: dict[str, tuple[int, int]] = {}
        self._rates: dict[str, Rate] = {}

    def update(self, groups: Sequence[GroupInfo], now: float) -> None:
        """Record the counts of a heartbeat."""
        seconds = now - self._at
        if seconds < _MIN_INTERVAL:
            return
        self._rates = {}
        for group in groups:
            seq, nbytes = self._counts.get(group.id, (group.seq, group.bytes))
            operations, sent = max(0, group.seq - seq), max(0, group.bytes - nbytes)
            self._rates[group.id] = Rate(operations / seconds, sent / seconds)
        self._at, self._counts = now, {group.id: (group.seq, group.bytes) for group in groups}

    def of(self, group: str) -> Rate:
        """Return the rate of a group, by its id; zero at its first heartbeat."""
        return self._rates.get(group, Rate(0.0, 0.0))
