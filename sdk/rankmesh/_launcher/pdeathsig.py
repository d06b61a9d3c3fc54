"""A child that dies with its parent, even when the parent is killed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dies_with_parent(parent: int | None = None) -> Callable[[], None]:
    """Return a function for a child to call: the kernel will kill the child when the thread that forked it ends.

    Everything is looked up here, so that between fork and exec the child only makes two system calls.

    Args:
        parent: process id of the parent, by default this process.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    parent = os.getpid() if parent is None else parent
    kill = int(signal.SIGKILL)

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel knew, so nobody would tell us
            os.kill(os.getpid(), kill)

    return tie


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process when nobody has the other end of a pipe any more. Nothing comes through it.

    Unlike dies_with_parent it is the process that matters, not its thread, and it need not be the parent.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
