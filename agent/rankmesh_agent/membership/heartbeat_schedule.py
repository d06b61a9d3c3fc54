"""Schedule of a rank's heartbeats: the gateway names the interval, and the ranks spread theirs over it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS


class HeartbeatSchedule:
    """Times of one rank's heartbeats. At an interval of HEARTBEAT_SECONDS, each tick of the thread sends one.

    Args:
        clock: monotonic seconds.
        fraction: returns a random number from 0 to 1.

    Attributes:
        interval: seconds between two heartbeats.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, fraction: Callable[[], float] = random.random
    ) -> None:
        self.interval = HEARTBEAT_SECONDS
        self._clock, self._fraction = clock, fraction
        self._next = clock()
        self._losses = 0

    def set_interval(self, interval: float) -> None:
        """Set the time of the next heartbeat, from now; after a change, that is a random part of the interval."""
        changed, self.interval = interval != self.interval, interval
        self._next = self._clock() + interval * (self._fraction() if changed else 1.0)

    def retry(self) -> None:
        """Have a heartbeat without a response repeated after one or two seconds."""
        self._next = self._clock() + min(self.interval, HEARTBEAT_SECONDS * (1 + self._fraction()))

    def is_due(self, losses: int) -> bool:
        """Return whether a heartbeat is due.

        Args:
            losses: the number of lost ranks that it would report. A new one is reported within half the interval: of
                many ranks that have lost the same one, the first reports it soon.
        """
        if losses > self._losses:
            self._losses = losses
            spread = self._fraction() * (self.interval - HEARTBEAT_SECONDS) / 2
            self._next = min(self._next, self._clock() + spread)
        return self.interval <= HEARTBEAT_SECONDS or self._clock() >= self._next
