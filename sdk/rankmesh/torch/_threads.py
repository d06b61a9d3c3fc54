"""Threads for the callbacks of futures.

A callback may wait for another call of the same group, which needs a thread to complete; so callbacks run neither in
the group's worker thread nor one behind another.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

from rankmesh._session.session import leave_at_exit
from rankmesh_agent.net.deadline import Deadline

_EXIT_SECONDS = 5.0
"""Longest wait at exit for running callbacks."""
_running: set[threading.Thread] = set()


def run_in_thread(callback: Callable[[], None]) -> None:
    """Call a function in a new thread."""

    def run() -> None:
        try:
            callback()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, name="rankmesh-callback", daemon=True)
    _running.add(thread)
    thread.start()


def _end() -> None:
    """Wait for callbacks before Python ends: torch's C++ crashes if they end later.

    The threads are daemons, and the sessions end first; so no callback waits for a rank that never comes.
    """
    leave_at_exit()
    deadline = Deadline(_EXIT_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # Python would print its traceback, and go on
        for thread in list(_running):
            thread.join(deadline.remaining())


atexit.register(_end)
