"""Signals: as bytes in a pipe, read by an event loop; and SIGKILL from the kernel when the parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
TERMINATION = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that terminate the launcher."""


class SignalPipe:
    """Context manager that collects the TERMINATION signals instead of delivering them; for the main thread only.

    A signal that was ignored before stays ignored, as nohup requires for SIGHUP.
    """

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _collect)
            for number in TERMINATION
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def wake(self) -> None:
        """Have the event loop look around, though no signal has come. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it is full, and will be read
            os.write(self._write_fd, bytes(1))

    def read(self) -> list[signal.Signals]:
        """Return the signals received since the last call, in order."""
        try:
            received = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in received if number in self._before]  # 0 is no signal


def _collect(*_: object) -> None:
    """Do nothing: any handler makes Python write the signal's number to the wakeup descriptor."""


def pdeathsig(parent: int | None = None) -> Callable[[], None]:
    """Return a function that makes the kernel kill the calling child when the thread that forked it ends.

    All lookups happen here, so that the child makes only two system calls between fork and exec.
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
