"""Reset of the descriptors and signals that a program inherits from its parent process, to those under a shell."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TextIO


def reset_inherited() -> None:
    """Open closed standard streams, unblock all signals, and stop ignoring SIGCHLD; for the start of a program.

    A descriptor 0, 1 or 2 that is free becomes a socket, into which other code prints. With SIGCHLD ignored, the kernel
    drops the exit statuses of child processes; blocked signals end neither this process nor its children. Other signals
    that are ignored stay so: nohup ignores SIGHUP, and a shell SIGINT for what it runs in the background.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115  # for good
            setattr(sys, name, stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    receive_exit_statuses()


def receive_exit_statuses() -> None:
    """Stop ignoring SIGCHLD; raise RuntimeError in another thread than the main one, which alone may change that."""
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "SIGCHLD is ignored, so the kernel drops the exit statuses of child processes: call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread first"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def print_line(text: str, stream: TextIO) -> None:
    """Print a line, if that is possible: a full disk, or a reader that has gone, does not end a service."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
