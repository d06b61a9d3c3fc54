"""Processes that the kernel kills when their parent dies, even of SIGKILL."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def pdeathsig(parent: int | None = None) -> Callable[[], None]:
    """Return a function that makes the kernel kill the calling child when the thread that forked it ends.

    All lookups happen here, so that the child makes only two system calls between fork and exec.

    Args:
        parent: process id of the parent, by default this process.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    parent = os.getpid() if parent is None else parent
    kill = int(signal.SIGKILL)

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os.kill(os.getpid(), kill)

    return tie


def kill_when_closed(pipe: int) -> None:
    """Make the kernel kill this process when the write end of an otherwise unused pipe is closed.

    Unlike ``pdeathsig`` this depends on a process, not on one of its threads, and the process need not be the parent.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # closed before F_SETOWN took effect
        os.kill(os.getpid(), signal.SIGKILL)
