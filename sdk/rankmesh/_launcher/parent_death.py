"""A child that dies with its parent, even when the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dies_with_parent() -> Callable[[], None]:
    """Return a function to run between fork and exec: the kernel will kill the child when this process ends.

    Everything is looked up here, before the fork, so that the child only makes two system calls.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    parent = os.getpid()
    kill = int(signal.SIGKILL)

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel knew, so nobody would tell us
            os.kill(os.getpid(), kill)

    return tie
