"""One rank: its process, its two output streams, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rankmesh._launcher.line_buffer import LineCutter
from rankmesh._launcher.output import Sink

TAIL_LINES = 10
"""How many of a stream's last lines are kept for the report."""
_TAIL_BYTES = 2000
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
_PF_EXITING = 0x4  # linux/sched.h


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its exit code, None if a signal ended it.
        signal: the number of that signal, None if it exited.
        at: when, on the monotonic clock.
    """

    code: int | None
    signal: int | None
    at: float

    @property
    def status(self) -> int:
        """The ending as a shell counts: the exit code, or 128 + the signal's number."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(self.signal).name} ({self.signal})"
        except ValueError:  # most real-time signals have no name
            return f"signal {self.signal}"


class Stream:
    """The pipe from a rank's stdout or stderr to a sink; ``tail`` has its last lines."""

    def __init__(self, pipe: IO[bytes], name: str, prefix: bytes, sink: Sink) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.name = name
        self.sink = sink
        self.fd = pipe.fileno()
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._pipe = pipe
        self._prefix = prefix
        self._cutter = LineCutter()

    @property
    def closed(self) -> bool:
        """Whether it came to its end."""
        return self._pipe.closed

    def read_some(self) -> int:
        """Pass on what is there; return the number of bytes. At the end of the stream, close it."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._pass_on(self._cutter.feed(data), self._cutter.unfinished())
        else:
            self._close()
        return len(data)

    def read_all(self) -> None:
        """Pass on what is in the pipe now, and not what somebody may go on to write."""
        taken = 0
        while not self.closed and taken < _PIPE_BYTES:
            read = self.read_some()
            if not read:
                break
            taken += read

    def cut_off(self) -> None:
        """Pass on what is in the pipe now and close it, although somebody may still hold the other end."""
        self.read_all()
        if not self.closed:
            self._close()

    def _close(self) -> None:
        self._pass_on(self._cutter.close(), b"")
        self._pipe.close()

    def _pass_on(self, lines: list[bytes], unfinished: bytes) -> None:
        self.tail.extend(line[:_TAIL_BYTES] for line in lines)
        drawn = self._prefix + unfinished if unfinished else b""
        self.sink.show([self._prefix + line for line in lines], self, drawn)


class Rank:
    """A rank that was started.

    Its process leads a session of its own: a Ctrl-C in the terminal reaches the launcher alone, which decides, and what
    the rank starts can be signalled together with it.

    Attributes:
        number: the rank.
        pid: its process id.
        pidfd: descriptor that becomes readable when the process ends.
        started: when, on the monotonic clock.
        stdout, stderr: its output.
        ending: how it ended, None while it runs.
        sent: the last signal the launcher sent it.
        released: whether nothing of it is left.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes], stdout: Sink, stderr: Sink) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        prefix = b"[rank %d] " % number
        self.number = number
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.started = time.monotonic()
        self.stdout = Stream(process.stdout, "stdout", prefix, stdout)
        self.stderr = Stream(process.stderr, "stderr", prefix, stderr)
        self.ending: Ending | None = None
        self.sent: signal.Signals | None = None
        self.released = False
        self._process = process

    @property
    def streams(self) -> tuple[Stream, Stream]:
        """Both streams."""
        return self.stdout, self.stderr

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        if self.ending is None:
            self.sent = number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def dies_of_signal(self) -> bool:
        """Whether a signal is ending the process: its peers can see that already, but its pidfd does not tell yet.

        The kernel closes a dying process's files, then takes its time (seconds, with a GPU) until it calls it ended.
        """
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        flags, exit_code = int(fields[6]), int(fields[49])  # fields 9 and 52 of proc_pid_stat(5)
        return bool(flags & _PF_EXITING and exit_code & 0x7F)

    def note_ending(self) -> Ending:
        """Return how the process, whose pidfd is readable, ended.

        The process stays a zombie until ``release``, so that nobody else gets its id, which is also its
        group's.
        """
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self.ending = Ending(
            code=result.si_status if exited else None,
            signal=None if exited else result.si_status,
            at=time.monotonic(),
        )
        return self.ending

    def release(self) -> None:
        """Kill whatever is left of the process and of what it started, and forget it. Does nothing the second time."""
        if self.released:
            return
        self.send(signal.SIGKILL)
        for stream in self.streams:
            stream.cut_off()
        self._process.wait()
        os.close(self.pidfd)
        self.released = True


def start(
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None,
    sinks: tuple[Sink, Sink],
    before_exec: Callable[[], None],
) -> Rank:
    """Start the process of a rank.

    Raises:
        OSError: the command cannot be executed.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=before_exec,
    )
    return Rank(number, process, *sinks)
