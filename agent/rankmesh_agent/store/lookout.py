"""Looking around for a moment before going to sleep: a message that comes soon need not wake anybody.

Waking a thread on a core that has gone to sleep takes longer than a whole request does. So each side of a connection
looks for the next message for about as long as that takes, where another core can send it meanwhile. Somebody for whom
nothing came that soon is busy or gone: the next times are spent asleep at once, twice as many after each such time, so
that looking costs a crowded machine next to nothing, and an idle one nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

SECONDS = 60e-6
"""How long somebody looks: about as long as both sides take to wake up and do a request."""
_MOST_DOUBLINGS = 6

E = TypeVar("E")


class Lookout(Generic[E]):
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

    def look(self) -> E | None:
        """Return what happens soon; None if that is nothing, or if sleeping is better."""
        if self._off:
            if self._off > 0:
                self._off -= 1
            return None
        attempt, arguments, over = self._attempt, self._arguments, monotonic() + SECONDS
        while True:
            os.sched_yield()  # to whoever is to send it, perhaps
            try:
                found = attempt(*arguments)
            except BlockingIOError:
                pass
            else:
                if found:
                    self._doublings = 0
                    return found
            if monotonic() >= over:
                break
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
        self._off = (1 << self._doublings) - 1
        return None
