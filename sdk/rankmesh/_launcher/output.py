"""The launcher's own stdout and stderr, written to without ever waiting for whoever reads them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

_FULL = 1 << 20
_ERASE_LINE = b"\r\x1b[K"


class Sink:
    """An output of the launcher: a queue of whole lines in front of a file descriptor.

    On a terminal the newest unfinished line (a progress bar, a prompt) is kept drawn below the finished ones. When the
    reader goes away the output is dropped and the job goes on: a training run should not die of its log viewer.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._queue = bytearray()
        self._gone = False
        self._is_terminal = os.isatty(fd)
        self._drawn: tuple[object, bytes] | None = None

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should be read from the ranks."""
        return len(self._queue) > _FULL

    def show(self, lines: Iterable[bytes], source: object = None, unfinished: bytes = b"") -> None:
        """Queue finished lines of a source, and the beginning of its next one."""
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
        """Write as much as a descriptor that is ready for writing takes without blocking."""
        try:
            # poll(2) calls a pipe writable when a write of PIPE_BUF bytes does not block, and promises no more.
            written = os.write(self.fd, bytes(self._queue[: select.PIPE_BUF]))
        except BlockingIOError:
            return
        except OSError:
            self._gone = True
            self._queue.clear()
            return
        del self._queue[:written]

    def _fitted(self, line: bytes) -> bytes:
        """Cut a line to the terminal's width: one that wraps could not be erased."""
        width = os.get_terminal_size(self.fd).columns or 80
        return line.decode(errors="replace")[: width - 1].encode()


def standard_sinks() -> tuple[Sink, Sink]:
    """Return the sinks for stdout and stderr: one and the same where both lead to the same place, to keep the order."""
    stdout = Sink(1)
    return stdout, stdout if os.path.sameopenfile(1, 2) else Sink(2)
