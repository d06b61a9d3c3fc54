"""Pace of the heartbeats of all ranks of a gateway: their interval grows with the number of ranks."""

from __future__ import annotations

import math

from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS

HEARTBEATS_A_SECOND = 1000
"""Heartbeats that a gateway receives in a second from all ranks together, at most, once they know the interval."""


class HeartbeatPace:
    """The interval that replies name.

    Attributes:
        interval: seconds; whole ones, so that it seldom changes.
    """

    def __init__(self) -> None:
        self.interval = HEARTBEAT_SECONDS

    def set_ranks(self, ranks: int) -> None:
        """Set the interval for a number of live ranks."""
        self.interval = self.interval_with(ranks, 0.0)

    def interval_with(self, ranks: int, least: float | None = None) -> float:
        """Return the interval for some ranks, at least the one now, or another one."""
        least = self.interval if least is None else least
        return max(least, HEARTBEAT_SECONDS, float(math.ceil(ranks / HEARTBEATS_A_SECOND)))
