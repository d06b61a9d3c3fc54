"""Attempts to connect to a server that listens, but closes connections before their handshake ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import StreamClosedError

_SECONDS = 5.0
"""Time limit of the attempts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5

T = TypeVar("T")


def is_closed_early(error: BaseException | None) -> bool:
    """Return whether an error of a new connection is that a server which listens has closed it."""
    return isinstance(error, StreamClosedError | ConnectionResetError | BrokenPipeError)


def until_accepted(connect: Callable[[], T], deadline: Deadline) -> T:
    """Return what ``connect`` returns; repeat it while the server closes the connection early, with pauses.

    A server does so if more clients than its limit connect at a time. One that ends does so, too: then the next attempt
    finds that it does not listen.

    Args:
        connect: raises StreamClosedError, or an error caused by it, if the server closes the connection.
        deadline: deadline of the attempts, which end after _SECONDS in any case.
    """
    limit, pause = Deadline(min(deadline.remaining(), _SECONDS)), _FIRST_PAUSE
    while True:
        try:
            return connect()
        except Exception as error:
            if not (is_closed_early(error) or is_closed_early(error.__cause__)) or limit.expired():
                raise
        time.sleep(min(pause * random.uniform(0.5, 1.5), limit.remaining()))  # many may have been refused
        pause = min(2 * pause, _LONGEST_PAUSE)
