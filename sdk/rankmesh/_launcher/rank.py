"""A rank of the launcher: its process, its two output streams, and its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rankmesh._launcher.output import LineBuffer, Output
from rankmesh_agent.wire.printable import printable

TAIL_LINES = 10
"""Last lines of a stream that are kept for the report."""
_TAIL_BYTES = 2000
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
_MAX_COMMAND = 80
_PF_EXITING = 0x4  # linux/sched.h


@dataclass(frozen=True)
class ExitStatus:
    """The exit status of a process."""

    code: int | None
    signal: int | None
    at: float

    @property
    def shell_status(self) -> int:
        """The status in a shell's form: the exit code, or 128 + the signal's number."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(self.signal).name} ({self.signal})"
        except ValueError:  # most real-time signals have no name
            return f"signal {self.signal}"


class Stream:
    """The pipe from a rank's stdout or stderr to an output; ``tail`` keeps the last lines."""

    def __init__(self, pipe: IO[bytes], name: str, prefix: bytes, output: Output) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.name = name
        self.file = output.file
        self.fd = pipe.fileno()
        self.inode = os.fstat(self.fd).st_ino
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._pipe = pipe
        self._prefix = prefix
        self._writer = output.writer
        self._cutter = LineBuffer()

    @property
    def closed(self) -> bool:
        """True if the stream has ended."""
        return self._pipe.closed

    @property
    def blocked(self) -> bool:
        """True if the stream must not be read for now."""
        return self._writer is not None and self._writer.full

    def read_some(self) -> int:
        """Forward the available bytes and return their number. Closes the pipe at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            if self.file is not None:
                self.file.write(data)
            self._forward(self._cutter.feed(data), self._cutter.unfinished())
        else:
            self._close()
        return len(data)

    def read_all(self) -> None:
        """Forward the bytes that are in the pipe now, but none that are written later."""
        taken = 0
        while not self.closed and taken < _PIPE_BYTES and (read := self.read_some()):
            taken += read

    def drain_and_close(self) -> None:
        """Forward the bytes that are in the pipe now and close it, even if a process holds the write end."""
        self.read_all()
        if not self.closed:
            self._close()

    def _close(self) -> None:
        self._forward(self._cutter.close(), b"")
        self._pipe.close()
        if self.file is not None:
            self.file.close()

    def _forward(self, lines: list[bytes], unfinished: bytes) -> None:
        self.tail.extend(line[:_TAIL_BYTES] for line in lines)
        if self._writer is not None:
            drawn = self._prefix + unfinished if unfinished else b""
            self._writer.write_lines([self._prefix + line for line in lines], self, drawn)


class Rank:
    """A started rank.

    Its process leads a session of its own: Ctrl-C in the terminal reaches the launcher alone, and the rank's child
    processes can be signalled together with it.

    Attributes:
        released: whether the launcher has let go of the process: what is left of its group is not the launcher's.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None,
        outputs: tuple[Output, Output],
        before_exec: Callable[[], None],
    ) -> None:
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
        assert process.stdout is not None
        assert process.stderr is not None
        prefix = b"[rank %d] " % number
        self.number = number
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.started = time.monotonic()
        self.streams = (
            Stream(process.stdout, "stdout", prefix, outputs[0]),
            Stream(process.stderr, "stderr", prefix, outputs[1]),
        )
        self.exit_status: ExitStatus | None = None
        self.sent: signal.Signals | None = None
        self.released = False
        self._process = process

    @property
    def failed(self) -> bool:
        """True if the process has ended without success."""
        return self.exit_status is not None and self.exit_status.shell_status != 0

    @property
    def ended_by_itself(self) -> bool:
        """True if the process has ended before the launcher sent it a signal."""
        return self.exit_status is not None and self.sent is None

    @property
    def ending(self) -> str:
        """The end of the process, as text: ``signal SIGTERM (15) from the launcher``."""
        status = self.exit_status
        sent = status is not None and status.signal is not None and status.signal == self.sent
        return f"{status} from the launcher" if sent else str(status)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group, and continue what is stopped, which receives it only then."""
        if self.exit_status is None:
            self.sent = number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            os.killpg(self.pid, signal.SIGCONT)

    def dies_of_signal(self) -> bool:
        """Return whether a signal is terminating the process: peers may notice before its pidfd becomes readable.

        The kernel closes the files of a dying process first, and may need seconds (with a GPU) until it is a zombie.
        """
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        flags, exit_code = int(fields[6]), int(fields[49])  # fields 9 and 52 of proc_pid_stat(5)
        return bool(flags & _PF_EXITING and exit_code & 0x7F)

    def reap(self) -> ExitStatus:
        """Return the exit status of the process, whose pidfd is readable.

        The process stays a zombie until ``release``, so that its id, also its group's, is not reused.
        """
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self.exit_status = ExitStatus(
            code=result.si_status if exited else None, signal=None if exited else result.si_status, at=time.monotonic()
        )
        return self.exit_status

    def holders(self) -> list[int]:
        """Return the ids of the other processes of this user that hold the output open."""
        links = {f"pipe:[{stream.inode}]" for stream in self.streams if not stream.closed}
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return sorted(pid for pid in pids if pid != os.getpid() and not links.isdisjoint(_links(pid)))

    def release(self, *, only_holders: bool = False) -> None:
        """Kill the process group, drain its output and reap it. Idempotent."""
        if self.released:
            return
        if only_holders:
            for pid in self.holders():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if os.getpgid(pid) == self.pid:
                        os.kill(pid, signal.SIGKILL)
        else:
            self.send(signal.SIGKILL)
        for stream in self.streams:
            stream.drain_and_close()
        self._process.wait()
        os.close(self.pidfd)
        self.released = True


def command_of(pid: int) -> str:
    """Return the command line of a process and its id: ``rsync -a out host: (pid 4711)``."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # it has ended
        words = []
    command = printable(b" ".join(words).decode(errors="replace").strip())
    return f"{command[:_MAX_COMMAND] or 'a process'} (pid {pid})"


def _links(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process refer to; nothing if it has ended, or is another user's."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"{folder}/{name}")
