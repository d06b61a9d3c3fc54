"""Adaptive spinning: polling for the next event for a moment before the thread blocks.

Waking a thread on an idle core takes longer than a whole store request. So each side of a connection polls for the next
message for about that long, while another core can send it. If no message comes in that time, the peer is busy or gone;
if the polling itself takes that long, other threads want the core or the interpreter lock. The next calls then block at
once, as many as make up for the lost time, and twice as many after each such call in a row. So spinning costs an
oversubscribed host next to nothing, and an idle one nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

SPIN_SECONDS = 60e-6
"""Duration of the polling of one call: about the time that both sides need to wake up and carry out a request."""
_MAX_DOUBLINGS = 6

E = TypeVar("E")


class AdaptiveSpin(Generic[E]):
    """Decides whether to poll before blocking, and polls.

    Args:
        attempt: a non-blocking call; it returns a false value, or raises BlockingIOError, if there is no event.
        arguments: its arguments.
    """

    __slots__ = ("_arguments", "_attempt", "_doublings", "_skip")

    def __init__(self, attempt: Callable[..., E], *arguments: object) -> None:
        self._attempt = attempt
        self._arguments = arguments
        self._doublings = 0
        self._skip = 0 if len(os.sched_getaffinity(0)) > 1 else -1

    def poll(self) -> E | None:
        """Return an event that comes soon; None if none comes, or if blocking is cheaper."""
        if self._skip:
            if self._skip > 0:
                self._skip -= 1
            return None
        attempt, arguments, began = self._attempt, self._arguments, monotonic()
        while True:
            os.sched_yield()  # the sender may wait for this core
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
