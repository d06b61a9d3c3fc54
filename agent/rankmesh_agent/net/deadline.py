"""A point in time by which a wait has to be over."""

from __future__ import annotations

import math
import time
from datetime import timedelta

_DAY = 86400.0


class Deadline:
    """When to give up: made, or restarted, once at a call's start, handed down to every wait inside it."""

    __slots__ = ("at", "seconds", "started")

    def __init__(self, seconds: float) -> None:
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Begin anew, for another call."""
        self.seconds = seconds
        self.started = time.monotonic()
        self.at = self.started + seconds

    def remaining(self) -> float:
        """Seconds left: never below 0, nor above a day, as no system call can wait for ever."""
        return min(max(0.0, self.at - time.monotonic()), _DAY)

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started

    def expired(self) -> bool:
        """Whether it is too late."""
        return time.monotonic() >= self.at


def seconds_of(timeout: timedelta | float | None, default: float) -> float:
    """Return a timeout in seconds, given as a timedelta (torch's way), as a number of seconds, or not at all.

    Raises:
        TypeError: it is none of these.
        ValueError: for a negative or NaN timeout.
    """
    if timeout is None:
        return default
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, str) or not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, got {timeout!r}")
    else:
        seconds = float(timeout)
    if seconds < 0 or math.isnan(seconds):
        raise ValueError(f"timeout must not be negative, got {timeout!r}; give seconds or a datetime.timedelta")
    return seconds
