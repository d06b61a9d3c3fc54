"""A process of ``spawn``, as it sees itself: its body, and what it leaves for its parent when it fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from types import FrameType
from typing import Any, NamedTuple

from rankmesh._launcher.interrupts import let_interrupts_through
from rankmesh._launcher.pdeathsig import die_with_writer, dies_with_parent
from rankmesh._launcher.plan import hand_token


class Words(NamedTuple):
    """What a process said of its failure.

    Attributes:
        at: when, on the monotonic clock.
        code: its exit code.
        trace: the traceback of its exception; empty if it just exits.
    """

    at: float
    code: int
    trace: str


class Report:
    """Where a process that fails says so: an anonymous file, which needs no reader and leaves nothing on the disk."""

    _HEADER = struct.Struct("!di")

    def __init__(self) -> None:
        self._fd = os.memfd_create("rankmesh-report")
        self._words: Words | None = None

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)

    def __setstate__(self, handle: Any) -> None:
        self._fd, self._words = handle.detach(), None

    def write(self, code: int, trace: str) -> None:
        """Say that this process fails now."""
        with open(self._fd, "wb", closefd=False) as file:
            file.write(self._HEADER.pack(time.monotonic(), code) + trace.encode(errors="backslashreplace"))

    def read(self) -> Words | None:
        """Return what the process said; None if it said nothing."""
        if self._fd < 0:
            return self._words
        said = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if len(said) < self._HEADER.size:
            return None
        at, code = self._HEADER.unpack_from(said)
        # The end may be missing while it is being written.
        return Words(at, code, said[self._HEADER.size :].decode(errors="ignore"))

    def close(self) -> None:
        """Let go of the file, and keep what it says. Does nothing the second time."""
        if self._fd >= 0:
            self._words = self.read()
            os.close(self._fd)
            self._fd = -1


def run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], method: str, report: Report, token: str) -> None:
    """Run the function; the body of each process.

    Args:
        fn: the function.
        index: its first argument.
        args: its other arguments.
        method: how the process was started.
        report: where it says that it failed.
        token: the secret of its job.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by multiprocessing"
    if method == "fork":  # those forked later have the parent's end of the pipe, too
        dies_with_parent(parent.pid)()
    else:
        die_with_writer(parent.sentinel)
    hand_token(token, os.environ)
    try:
        let_interrupts_through()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        fn(index, *args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code:
            report.write(code & 0xFF, "")
        raise
    except KeyboardInterrupt as error:
        sys.last_value = error
    except BaseException as error:
        # What Python does with an exception that nobody catches; at exit the other ranks are told about it.
        sys.last_value = error
        report.write(1, traceback.format_exc())
        sys.exit(1)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but only once: the terminal sends Ctrl-C to all processes, and the parent passes it on.

    A second one would cut off what the function does to end in order.
    """
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)
