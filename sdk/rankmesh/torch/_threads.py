"""Threads for the callbacks of futures.

A callback may wait for another call of the same group, whose completion needs a thread as well: so it runs neither in
the group's worker nor behind another callback.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from rankmesh._session.session import leave_at_exit
from rankmesh_agent.net.deadline import Deadline

_PATIENCE = 5.0
"""Seconds the process waits at its end for callbacks that run."""
_running: set[threading.Thread] = set()


def run_in_thread(callback: Callable[[], None]) -> None:
    """Call ``callback`` in a thread of its own."""

    def run() -> None:
        try:
            callback()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, name="rankmesh-callback", daemon=True)
    _running.add(thread)
    thread.start()


def _end() -> None:
    """Have callbacks end before Python does, of which torch's C++ would make a crash.

    They are daemons, and what they wait for fails first: otherwise the process would wait with them for a rank that
    never comes.
    """
    leave_at_exit()
    patience = Deadline(_PATIENCE)
    for thread in list(_running):
        thread.join(patience.remaining())


atexit.register(_end)
