"""Outputs of the ranks: the launcher's own stdout and stderr, and files with torchrun's names.

The files are ``<log-dir>/<job>_<random>/attempt_<number>/<local rank>/stdout.log`` and ``stderr.log``.
Source: torch.distributed.elastic.multiprocessing.DefaultLogsSpecs
"""

from __future__ import annotations

import errno
import io
import os
import select
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

_FULL = 1 << 20
_ERASE_LINE = b"\r\x1b[K"


class TerminalWriter:
    """A queue of complete lines in front of a file descriptor.

    On a terminal, the newest unfinished line (a progress bar, a prompt) stays below the finished ones. If the reader
    closes its end, output is dropped and the job continues: a training run must not die with its log viewer. Nor with
    a full disk: then later output is tried again.

    Attributes:
        name: ``stdout`` or ``stderr``, for messages.
        lost: the first error because of which output is missing from a file; None without one.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.name = "stdout" if fd == 1 else "stderr"
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


class LogFile:
    """A file with the output of a rank; ``lost`` is the first error because of which output is missing from it."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.lost: OSError | None = None
        self._file = io.FileIO(path, "a")

    def write(self, data: bytes) -> None:
        """Append bytes."""
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.lost = self.lost or error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LogOptions(NamedTuple):
    """torchrun's options for the output of ranks.

    Attributes:
        directory: of the files; empty for a new one.
        redirects: which streams are written to files and not shown: 1 stdout, 2 stderr, 3 both, or by local rank
            ``0:1,1:3``.
        shown: the local ranks whose output is shown; empty for all.
    """

    directory: str = ""
    redirects: str = "0"
    tee: str = "0"
    shown: tuple[int, ...] = ()

    @property
    def has_files(self) -> bool:
        """True if a stream is written to a file."""
        return any(each.rpartition(":")[2] != "0" for each in f"{self.redirects},{self.tee}".split(","))


class Output(NamedTuple):
    """Destinations of a stream of a rank: the launcher's own, None if it is not shown there, and a file."""

    writer: TerminalWriter | None
    file: LogFile | None = None


class Outputs:
    """The outputs of a launcher.

    Attributes:
        writers: of the launcher's stdout and stderr: one object if both are the same file, which keeps the order.
        directory: the directory of the job's files; empty without any.
    """

    def __init__(self, logs: LogOptions, job: str) -> None:
        stdout = TerminalWriter(1)
        self.writers = stdout, stdout if os.path.sameopenfile(1, 2) else TerminalWriter(2)
        self.directory = ""
        self._logs = logs
        if logs.has_files:
            try:
                parent = logs.directory or tempfile.mkdtemp(prefix="rankmesh_")
                os.makedirs(parent, exist_ok=True)
                self.directory = tempfile.mkdtemp(prefix=f"{job}_", dir=parent)
            except OSError as error:
                place = logs.directory or tempfile.gettempdir()
                raise ValueError(f"--log-dir: no directory can be made in {place}: {error.strerror}") from error

    def of_rank(self, local_rank: int, attempt: int) -> tuple[Output, Output]:
        """Return where stdout and stderr of a rank go."""
        stdout, stderr = (self._output(stream, local_rank, attempt) for stream in (0, 1))
        return stdout, stderr

    def _output(self, stream: int, local_rank: int, attempt: int) -> Output:
        teed = _streams(self._logs.tee, local_rank) >> stream & 1
        redirected = _streams(self._logs.redirects, local_rank) >> stream & 1
        shown = (teed or not redirected) and local_rank in (self._logs.shown or (local_rank,))
        writer = self.writers[stream] if shown else None
        if not teed and not redirected:
            return Output(writer)
        folder = os.path.join(self.directory, f"attempt_{attempt}", str(local_rank))
        os.makedirs(folder, exist_ok=True)
        return Output(writer, LogFile(os.path.join(folder, ("stdout.log", "stderr.log")[stream])))


def _streams(option: str, local_rank: int) -> int:
    """Return the streams of a rank that a value of --redirects or --tee names."""
    if ":" not in option:
        return int(option)
    by_rank = dict(each.split(":") for each in option.split(","))
    return int(by_rank.get(str(local_rank), 0))


LONGEST_LINE = 16 << 20
"""Longer lines are split, in bytes, so that a stream without newlines cannot exhaust memory."""


class LineBuffer:
    r"""Splits a stream of bytes into lines.

    A carriage return restarts the line, as on a terminal: only the last state of a progress bar counts. ``\r\n`` is a
    newline. The bytes need not be text.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append the stream's next bytes; return the lines they complete, without newlines."""
        lines: list[bytes] = []
        first, *others = data.split(b"\n")
        self._append(first, lines)
        for piece in others:
            lines.append(_last_state(self._rest))
            self._rest.clear()
            self._append(piece, lines)
        return lines

    def unfinished(self, most: int = 4096) -> bytes:
        """Return the first ``most`` bytes of the unfinished line."""
        return bytes(self._rest[:most]).rstrip(b"\r")

    def close(self) -> list[bytes]:
        """Return the last line of the stream if it lacks a newline and is not blank."""
        line = _last_state(self._rest)
        self._rest.clear()
        return [line] if line.strip() else []

    def _append(self, data: bytes, lines: list[bytes]) -> None:
        self._rest += data
        if b"\r" in data:
            returned = self._rest.endswith(b"\r")
            self._rest[:] = _last_state(self._rest) + b"\r" * returned
        while len(self._rest) > self._longest:
            lines.append(bytes(self._rest[: self._longest]))
            del self._rest[: self._longest]


def _last_state(line: bytearray) -> bytes:
    shown = line.rstrip(b"\r")
    return bytes(shown[shown.rfind(b"\r") + 1 :])
