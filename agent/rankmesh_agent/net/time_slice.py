"""The time slice that a thread asks the kernel's scheduler for: a shorter one gets it a core sooner after a wakeup.

Since Linux 6.12 a thread of the ordinary policy may choose its slice (``sched_runtime`` of sched_setattr(2)). A thread
that wakes preempts one with a longer slice, where it would wait for the end of that slice otherwise: for some
milliseconds, several times in a collective. Its share of the cores stays the same. Older kernels ignore the slice.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine()) if sys.platform == "linux" else None
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, and four more, of which the second is the slice in nanoseconds."""
_RESET_ON_FORK = 1
"""Flag: children and later threads have the kernel's slice. Those of a nice value below 0 would lose that, too."""
_SHORTEST = 100_000
_libc = None if _SET_ATTRIBUTES is None else ctypes.CDLL(None)


def shorten_time_slice() -> None:
    """Ask for the shortest slice for this thread, unless its user has given it a priority; do nothing if refused."""
    if _libc is not None and os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        if nice >= 0:
            _libc.syscall(
                _SET_ATTRIBUTES,
                0,
                _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SHORTEST, 0, 0),
                0,
            )
