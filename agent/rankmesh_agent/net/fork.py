"""Forked children: only the thread that forked exists there, and locks that other threads held stay held.

A child that makes no call of RankMesh is to run as without it. Its copies of the parent's sockets are closed, as a peer
sees the end of a connection only once all copies are closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def reset_lock(lock: Any) -> None:
    """Release a Lock or RLock in a forked child, whichever thread of the parent holds it."""
    lock._at_fork_reinit()


def reset_after_fork(lock: Any) -> Any:
    """Return the lock, which every forked child has unlocked; for a lock that lives as long as the process."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock


def detach(descriptors: Iterable[int]) -> None:
    """Replace sockets that objects of the parent own by /dev/null.

    To close the descriptors would leave their numbers to other files, which those objects may then close.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        if descriptor >= 0:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)
