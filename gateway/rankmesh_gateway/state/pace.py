"""Pace of the heartbeats of all ranks of a gateway: their interval grows with the number of ranks."""

from __future__ import annotations

import math

from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS

HEARTBEATS_A_SECOND = 500
"""Heartbeats of all ranks together in a second, at most, once they know the interval: about a fifth of a core."""


class HeartbeatPace:
    """The interval that replies name.

    Attributes:
        interval: seconds; whole ones, so that it seldom changes.
    """

    def __init__(self) -> None:
        self.interval = HEARTBEAT_SECONDS

    def set_ranks(self, ranks: int) -> None:
        """Set the interval for a number of live ranks."""
        self.interval = max(HEARTBEAT_SECONDS, float(math.ceil(ranks / HEARTBEATS_A_SECOND)))

    def add_ranks(self, ranks: int) -> float:
        """Return the interval from now on, as these ranks are live."""
        before = self.interval
        self.set_ranks(ranks)
        self.interval = max(before, self.interval)
        return self.interval
