"""Throughput of a rank's groups, from one heartbeat to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.wire.schemas import GroupInfo

_MIN_INTERVAL = 0.5
"""Seconds. Heartbeats closer together, where the second one was urgent, give no rate."""


class Rate(NamedTuple):
    """Operations, bytes, and seconds in operations, a second."""

    operations: float
    bytes: float
    busy: float


class Rates:
    """The rates of one rank's groups. A group that a heartbeat does not name has had no operation since the last."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._counts: dict[str, tuple[int, int, float]] = {}
        self._reported: dict[str, tuple[int, int, float]] = {}
        self._rates: dict[str, Rate] = {}

    def update(self, groups: Sequence[GroupInfo], now: float) -> None:
        """Record the counts of a heartbeat."""
        self._reported |= {group.id: (group.seq, group.bytes, group.seconds) for group in groups}
        seconds = now - self._at
        if seconds < _MIN_INTERVAL:
            return
        self._rates = {}
        for group, counts in self._reported.items():
            before = self._counts.get(group, counts)
            changes = (max(0, count - old) for count, old in zip(counts, before, strict=True))
            self._rates[group] = Rate(*(change / seconds for change in changes))
        self._counts |= self._reported
        self._at, self._reported = now, {}

    def end(self, group: str) -> None:
        """Forget a group."""
        for counts in (self._counts, self._reported, self._rates):
            counts.pop(group, None)

    def of(self, group: str) -> Rate:
        """Return the rate of a group, by its id; zero at its first heartbeat."""
        return self._rates.get(group, Rate(0.0, 0.0, 0.0))
