"""Threads for the callbacks of futures.

A callback may wait for another call of the same group, whose completion needs a thread as well: so it runs neither in
the group's worker nor behind another callback. There are as many threads as there are callbacks under way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_MOST = 256


def soon(callback: Callable[[], None]) -> None:
    """Call ``callback`` in a thread that is free, or new."""
    _pool().submit(callback)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST, "rankmesh-callback")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
