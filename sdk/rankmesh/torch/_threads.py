"""Threads for the callbacks of futures.

A callback may wait for another call of the same group, which needs a thread to complete; so callbacks run neither in
the group's worker thread nor one behind another. A thread stays for later callbacks: the start of one takes longer than
a callback of DistributedDataParallel's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

from rankmesh._session.session import leave_at_exit
from rankmesh_agent.net.deadline import Deadline

_EXIT_SECONDS = 5.0
"""Longest wait at exit for running callbacks."""
_Callbacks = queue.SimpleQueue[Callable[[], None]]
_idle: list[_Callbacks] = []
"""Of the threads that have no callback."""
_running: set[_Callbacks] = set()


def run_in_thread(callback: Callable[[], None]) -> None:
    """Call a function in a thread of its own."""
    try:
        given = _idle.pop()
    except IndexError:
        given = queue.SimpleQueue()
        threading.Thread(target=_run, args=(given,), name="rankmesh-callback", daemon=True).start()
    _running.add(given)
    given.put(callback)


def _run(given: _Callbacks) -> None:
    while True:
        callback = given.get()
        try:
            callback()
        finally:
            _running.discard(given)
        del callback  # with the user's tensors
        _idle.append(given)


def _end() -> None:
    """Wait for callbacks before Python ends: torch's C++ crashes if they end later.

    The threads are daemons, and the sessions end first; so no callback waits for a rank that never comes.
    """
    leave_at_exit()
    deadline = Deadline(_EXIT_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # Python would print its traceback, and go on
        while _running and not deadline.expired():
            time.sleep(0.001)


atexit.register(_end)
for _threads in (_idle, _running):
    os.register_at_fork(after_in_child=_threads.clear)
