"""Forked children: only the thread that forked exists there, and locks that other threads held stay held.

A child that makes no call of RankMesh is to run as without it. Its copies of the parent's connections are closed, as a
peer sees the end of a connection only once all copies are closed.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # registers its hooks before the ones here, as does logging
import logging  # noqa: F401  # see _before_fork
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


D = TypeVar("D", bound=_Descriptor)
_FORK_SECONDS = 5.0
_closed_in_children: weakref.WeakSet[_Descriptor] = weakref.WeakSet()
import_lock = threading.RLock()
"""Held while a thread of RankMesh imports modules that the user's program may not have. A fork waits for its release,
for at most _FORK_SECONDS: a child waits for ever for a module that another thread of its parent was importing."""


def _before_fork() -> None:
    # The hooks that were registered last run first. The one of logging takes its lock, which an import may need. Those
    # of concurrent.futures must not be registered while this one waits: its lock would be released without being taken.
    import_lock.acquire(timeout=_FORK_SECONDS)


def _after_fork_in_parent() -> None:
    if import_lock._is_owned():  # type: ignore[attr-defined]
        import_lock.release()


def _after_fork_in_child() -> None:
    if import_lock._is_owned():  # type: ignore[attr-defined]
        import_lock.release()
    else:
        reset_lock(import_lock)
    _close_copies()


if sys.platform != "win32":
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def after_fork(function: Callable[[], object]) -> None:
    """Have every forked child call a function; nothing where processes do not fork."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=function)


def reset_lock(lock: Any) -> None:
    """Release a Lock or RLock in a forked child, whichever thread of the parent holds it."""
    lock._at_fork_reinit()


def reset_after_fork(lock: Any) -> Any:
    """Return the lock, which every forked child has unlocked; for a lock that lives as long as the process."""
    after_fork(lock._at_fork_reinit)
    return lock


def close_in_children(file: D) -> D:
    """Return a socket, pipe or locked file, of which forked children close their copies."""
    _closed_in_children.add(file)
    return file


def _close_copies() -> None:
    """Replace the descriptors of the parent's sockets by /dev/null: closed ones may become those of other files."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for file in list(_closed_in_children):
        try:
            descriptor = file.fileno()
        except ValueError:  # a closed pipe
            continue
        if descriptor >= 0:
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _closed_in_children.clear()
