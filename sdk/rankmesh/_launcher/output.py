"""The launcher's own stdout and stderr, written without blocking on their reader."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterable

_FULL = 1 << 20
_ERASE_LINE = b"\r\x1b[K"


class TerminalWriter:
    """A queue of complete lines in front of a file descriptor.

    On a terminal, the newest unfinished line (a progress bar, a prompt) stays below the finished ones. If the reader
    closes its end, output is dropped and the job continues: a training run must not die with its log viewer. Nor with
    a full disk: then later output is tried again.

    Attributes:
        lost: the first error because of which output is missing from a file; None without one.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lost: OSError | None = None
        self._queue = bytearray()
        self._gone = False
        self._is_terminal = os.isatty(fd)
        self._drawn: tuple[object, bytes] | None = None

    @property
    def pending(self) -> bool:
        """True if bytes are queued."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """True if the queue is so long that the ranks' output must not be read for now."""
        return len(self._queue) > _FULL

    def write_lines(self, lines: Iterable[bytes], source: object = None, unfinished: bytes = b"") -> None:
        """Queue finished lines of a source, and the beginning of its unfinished one."""
        if self._gone:
            return
        if self._drawn:
            self._queue += _ERASE_LINE
        for line in lines:
            self._queue += line + b"\n"
        if not self._is_terminal:
            return
        if unfinished:
            self._drawn = (source, unfinished)
        elif self._drawn and self._drawn[0] is source:
            self._drawn = None
        if self._drawn:
            self._queue += self._fitted(self._drawn[1])

    def write_some(self) -> None:
        """Write as much as a writable descriptor accepts without blocking."""
        try:
            # poll(2) guarantees no more than that PIPE_BUF bytes can be written to a pipe without blocking.
            written = os.write(self.fd, bytes(self._queue[: select.PIPE_BUF]))
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EPIPE or self._is_terminal:
                self._gone = True
            else:
                self.lost = self.lost or error
            self._queue.clear()
            return
        del self._queue[:written]

    def _fitted(self, line: bytes) -> bytes:
        """Cut a line to the terminal's width: a wrapped line could not be erased."""
        width = os.get_terminal_size(self.fd).columns or 80
        return line.decode(errors="replace")[: width - 1].encode()


def standard_writers() -> tuple[TerminalWriter, TerminalWriter]:
    """Return the writers of stdout and stderr: one object if both are the same file, which keeps the order."""
    stdout = TerminalWriter(1)
    return stdout, stdout if os.path.sameopenfile(1, 2) else TerminalWriter(2)
