"""Deadline of a call: the point in time at which its waits end; and calls in threads, which have none themselves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

_DAY = 86400.0
T = TypeVar("T")


class Deadline:
    """A point in time, set once at the start of a call and passed to every wait inside it."""

    __slots__ = ("at", "seconds", "started")

    def __init__(self, seconds: float) -> None:
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Restart, for another call."""
        self.seconds = seconds
        self.started = time.monotonic()
        self.at = self.started + seconds

    def remaining(self) -> float:
        """Remaining seconds: at least 0, and at most a day, since no system call can wait for ever."""
        return min(max(0.0, self.at - time.monotonic()), _DAY)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.at


def seconds_of(timeout: timedelta | float | None, default: float) -> float:
    """Return a timeout in seconds, given as a timedelta, as in torch, or as a number of seconds; None is ``default``.

    Raises:
        TypeError: the timeout has another type.
        ValueError: the timeout is negative or NaN.
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


def in_thread(name: str, function: Callable[..., T], *arguments: Any, into: Future[T] | None = None) -> Future[T]:
    """Call a function in a daemon thread of its own; return the future of its result."""
    future = Future() if into is None else into

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
