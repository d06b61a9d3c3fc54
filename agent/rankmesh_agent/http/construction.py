"""One web application at a time: FastAPI and pydantic silence warnings of their own in a way that threads undo."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Import the web framework and make an application in a block of this."""
    with _lock:
        yield


def _renew_after_fork() -> None:
    """The thread that held the lock is not in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_after_fork)
