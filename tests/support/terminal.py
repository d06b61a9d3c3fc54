"""A command on a terminal, whose keys are pressed and whose screen is read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from types import TracebackType

from support.command import COMMAND, environment

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")
_SECONDS = 60.0


class Terminal:
    """A command on a pseudo-terminal of its own, which it controls: Ctrl-C is a key.

    Attributes:
        seen: all that the command has written.
    """

    def __init__(self, *arguments: str, rows: int = 50, columns: int = 200, **variables: str) -> None:
        self.seen = b""
        self._read = 0
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=environment(TERM="xterm-256color", **variables),
            preexec_fn=self._enter,
        )

    def _enter(self) -> None:
        os.login_tty(os.dup(self._theirs))
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def until(self, pattern: str) -> str:
        """Read until a pattern is in what the command has written since the last match; return that, without colours.

        What it writes has to be read all the time: a terminal that is full stops the command.
        """
        end = time.monotonic() + _SECONDS
        while True:
            text = _ESCAPES.sub("", self.seen[self._read :].decode(errors="replace")).replace("\r\n", "\n")
            if re.search(pattern, text):
                self._read = len(self.seen)
                return text
            assert time.monotonic() < end, f"no {pattern!r} in\n{text}"
            self._take()

    def _take(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            self.seen += os.read(self._ours, 1 << 16)

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read until the command ends; return its exit code. It has left the terminal as it was."""
        end = time.monotonic() + _SECONDS
        while self._process.poll() is None:
            assert time.monotonic() < end, self.seen
            self._take()
        self._take()
        assert termios.tcgetattr(self._theirs) == self._before
        return self._process.returncode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)
