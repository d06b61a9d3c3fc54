"""Looking around for a moment before going to sleep: a message that comes soon need not wake anybody.

Waking a thread on a core that has gone to sleep takes longer than a whole request does. So each side of a connection
looks for the next message for about as long as that takes, where another core can send it meanwhile. If none comes that
soon, the other side is busy or gone; if looking itself takes that long, others want the core or the interpreter. Then
the next times are spent asleep at once, as many as make up for the time lost, and twice as many after each such time in
a row. So looking costs a crowded machine next to nothing, and an idle one nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

SPIN_SECONDS = 60e-6
"""How long somebody looks: about as long as both sides take to wake up and do a request."""
_MOST_DOUBLINGS = 6

E = TypeVar("E")


class Spinner(Generic[E]):
    """Decides when to look, and looks.

    Args:
        attempt: asks what has happened, without waiting; it returns something false, or raises BlockingIOError, if
            nothing has.
        arguments: its arguments.
    """

    __slots__ = ("_arguments", "_attempt", "_doublings", "_off")

    def __init__(self, attempt: Callable[..., E], *arguments: object) -> None:
        self._attempt = attempt
        self._arguments = arguments
        self._doublings = 0
        self._off = 0 if len(os.sched_getaffinity(0)) > 1 else -1

    def spin(self) -> E | None:
        """Return what happens soon; None if that is nothing, or if sleeping is better."""
        if self._off:
            if self._off > 0:
                self._off -= 1
            return None
        attempt, arguments, began = self._attempt, self._arguments, monotonic()
        while True:
            os.sched_yield()  # to whoever is to send it, perhaps
            try:
                found = attempt(*arguments)
            except BlockingIOError:
                found = None
            took = monotonic() - began
            if took >= SPIN_SECONDS:
                self._off = int(took / SPIN_SECONDS) << self._doublings
                self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
                return found or None
            if found:
                self._doublings = 0
                return found
