"""The child process of ``spawn``: its body, and the error that it passes to its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from types import FrameType
from typing import Any, NamedTuple

from rankmesh._launcher.pdeathsig import kill_when_closed, pdeathsig
from rankmesh_agent.net.interrupts import deliver_interrupts


class ChildError(NamedTuple):
    """The failure of a child process.

    Attributes:
        at: time of the failure, on the monotonic clock.
        code: exit code.
        trace: traceback of the exception; empty for ``sys.exit``.
    """

    at: float
    code: int
    trace: str


class ErrorFile:
    """An anonymous file to which a failing child writes its error: needs no reader and leaves nothing on the disk."""

    _HEADER = struct.Struct("!di")

    def __init__(self) -> None:
        self._fd = os.memfd_create("rankmesh-report")
        self._error: ChildError | None = None

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)

    def __setstate__(self, handle: Any) -> None:
        self._fd, self._error = handle.detach(), None

    def write(self, code: int, trace: str) -> None:
        """Record the failure of this process."""
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._HEADER.pack(time.monotonic(), code) + trace.encode(errors="backslashreplace"))

    def read(self) -> ChildError | None:
        """Return the recorded failure, None if there is none."""
        if self._fd < 0:
            return self._error
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if len(content) < self._HEADER.size:
            return None
        at, code = self._HEADER.unpack_from(content)
        # The end may be missing while the child writes it.
        return ChildError(at, code, content[self._HEADER.size :].decode(errors="ignore"))

    def close(self) -> None:
        """Close the file but keep its content. Idempotent."""
        if self._fd >= 0:
            self._error = self.read()
            os.close(self._fd)
            self._fd = -1


def run(
    fn: Callable[..., Any],
    index: int,
    args: tuple[Any, ...],
    method: str,
    report: ErrorFile,
    environment: Mapping[str, str],
) -> None:
    """Run the function; the body of each process.

    Args:
        fn: the function.
        index: its first argument.
        args: its other arguments.
        method: the start method.
        report: receives a failure.
        environment: variables of the process, besides its parent's.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by multiprocessing"
    if method == "fork":  # children forked later inherit the write end of the sentinel pipe
        pdeathsig(parent.pid)()
    else:
        kill_when_closed(parent.sentinel)
    for name, value in environment.items():
        os.environ[name] = value
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # which the parent sends
    try:
        deliver_interrupts()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        fn(index, *args)
    except SystemExit as error:
        if code := exit_status(error):
            sys.last_value = error
            report.write(code, "")
        raise
    except BaseException as error:
        sys.last_value = error  # as Python does with an uncaught exception: the exit handler reports it to other ranks
        if not isinstance(error, KeyboardInterrupt):
            report.write(1, _traceback(error))
            sys.exit(1)


def exit_status(error: SystemExit) -> int:
    """Return the exit status of the process that a SystemExit ends."""
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _traceback(error: BaseException) -> str:
    from rankmesh._launcher.tracebacks import folded

    return folded(error)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once: the terminal sends Ctrl-C to all processes, and the parent forwards it as well.

    A second exception would interrupt the function's cleanup.
    """
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)
