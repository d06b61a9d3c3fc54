"""Spinning: polling for the next event for a moment before the thread blocks, as long as the cores are free for it.

Waking a thread on an idle core takes longer than a whole store request. So each side of a connection polls for the next
message for about that long, while another core can send it. If no message comes in that time, the peer is busy or gone;
if the polling itself takes that long, other threads want the core or the interpreter lock. The next calls then block at
once, as many as make up for the lost time, and twice as many after each such call in a row. So spinning costs an
oversubscribed host next to nothing, and an idle one nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine()) if sys.platform == "linux" else None
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, and four more, of which the second is the slice in nanoseconds."""
_RESET_ON_FORK = 1
"""Flag: children and later threads have the kernel's slice. Those of a nice value below 0 would lose that, too."""
_SHORTEST = 100_000
_libc = None if _SET_ATTRIBUTES is None else ctypes.CDLL(None)


def shorten_time_slice() -> None:
    """Ask the scheduler for the shortest time slice for this thread, unless its user has given it a priority.

    Since Linux 6.12 a thread that wakes preempts one with a longer slice, where it would wait for the end of that slice
    otherwise: for some milliseconds, several times in a collective. Its share of the cores stays the same.
    """
    if _libc is not None and os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        if nice >= 0:
            _libc.syscall(
                _SET_ATTRIBUTES,
                0,
                _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SHORTEST, 0, 0),
                0,
            )


SPIN_SECONDS = 60e-6
"""Duration of the polling of one call: about the time that both sides need to wake up and carry out a request."""
_MAX_DOUBLINGS = 6
_SLICE_SECONDS = 0.0015
"""Duration of a yield of the core after which another program has had a time slice: most take 2 to 4 ms. The ranks of
an oversubscribed host that exchange 1 MiB keep each other waiting for as long a few times in a thousand."""
_AGAIN_SECONDS = 0.1
"""Within this time a second time slice shows that a program stays: most single ones are a disturbance."""
_BLOCK_SECONDS, _MAX_BLOCK_SECONDS = 0.02, 1.28
"""Shortest and longest time without spinning. A time slice for each longest one takes less than 1 %."""

E = TypeVar("E")


class CoreContention:
    """Detects programs that compete for the cores of this process, by the duration of the yields between its polls.

    A thread that polls yields its core now and then, because the process that it waits for may need it. Where another
    program takes it, that program has a whole time slice, and the polling has used up a part of this process's share. A
    thread that blocks gets a core soon after it is woken, the sooner the shorter its slice. So on a busy host all waits
    of the process block at once, for a time that doubles as long as the other programs stay.

    Attributes:
        free_at: when waits may poll again, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.free_at = -_MAX_BLOCK_SECONDS
        self._block_seconds = 0.0

    def should_spin(self) -> bool:
        """Return whether a wait should poll before it blocks."""
        return monotonic() >= self.free_at

    def yield_core(self) -> bool:
        """Yield the core; return False if another program had a time slice: then the wait should block."""
        began = monotonic()
        os.sched_yield()
        now = monotonic()
        if now - began < _SLICE_SECONDS:
            return True
        self.lose_time_slice(began, now)
        return False

    def lose_time_slice(self, began: float, now: float) -> None:
        """Record a yield in which another program had a time slice."""
        again = began < self.free_at + 4 * self._block_seconds + _AGAIN_SECONDS
        self._block_seconds = min(max(2 * self._block_seconds, _BLOCK_SECONDS), _MAX_BLOCK_SECONDS) if again else 0.0
        self.free_at = now + self._block_seconds
        if again:
            shorten_time_slice()


core_contention = CoreContention()
"""Contention for the cores of this process: what one wait finds holds for all."""


class AdaptiveSpin(Generic[E]):
    """Decides whether to poll before blocking, and polls."""

    __slots__ = ("_arguments", "_attempt", "_doublings", "_skip")

    def __init__(self, attempt: Callable[..., E], *arguments: object) -> None:
        self._attempt = attempt
        self._arguments = arguments
        self._doublings = 0
        self._skip = 0 if len(os.sched_getaffinity(0)) > 1 else -1

    def poll(self) -> E | None:
        """Return an event that comes soon; None if none comes, or if blocking is cheaper."""
        if self._skip or not core_contention.should_spin():
            if self._skip > 0:
                self._skip -= 1
            return None
        attempt, arguments, began = self._attempt, self._arguments, monotonic()
        while True:
            core_contention.yield_core()  # the sender may wait for this core
            try:
                found = attempt(*arguments)
            except BlockingIOError:
                found = None
            took = monotonic() - began
            if took >= SPIN_SECONDS:
                self._skip = int(took / SPIN_SECONDS) << self._doublings
                self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS)
                return found or None
            if found:
                self._doublings = 0
                return found
