"""The ranks of one implementation as the benchmark sees them: started, given orders, ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks.implementations import Implementation

CHECKOUT = Path(__file__).resolve().parent.parent
START_SECONDS, ORDER_SECONDS, END_SECONDS = 90.0, 90.0, 15.0
Message = dict[str, Any]


class MeasurementError(SystemExit):
    """Ranks did not start, died, returned a wrong result or took too long: the message, and exit code 1."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that no process is given meanwhile; a server that sets SO_REUSEADDR may listen there."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class Channel:
    """One end of a local socket that carries JSON lines, whatever launched the ranks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = connection.makefile("rwb")

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Connect to the socket that listens at a path."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: Message) -> None:
        """Send one message."""
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, None if the other end has closed; TimeoutError makes the channel unusable."""
        self._socket.settimeout(timeout)
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        """Close this end, whether or not the other one still exists."""
        with contextlib.suppress(ConnectionError):
            self._lines.close()
        self._socket.close()


class WorkerGroup:
    """The ranks of one implementation, alive in a ``with`` block."""

    def __init__(self, implementation: Implementation, ranks: int) -> None:
        self.implementation = implementation
        self.ranks = ranks
        self.version = ""
        self._channels: list[Channel] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="rankmesh-bench-")
        path, self._log = Path(self._folder.name, "socket"), Path(self._folder.name, "output")
        one = self.implementation
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as output:
            listener.bind(str(path))
            listener.listen(self.ranks)
            self._launcher = subprocess.Popen(
                one.command(self.ranks, str(path)),
                cwd=CHECKOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **one.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                self._accept(listener)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        """Close the sockets, upon which the ranks end; terminate the launcher, with its ranks, if they do not."""
        for channel in self._channels:
            channel.close()
        for end in (self._launcher.terminate, self._launcher.kill):
            try:
                self._launcher.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                end()
        self._launcher.wait()
        self._folder.cleanup()

    def measure(
        self, operation: str, nbytes: int, calls: float, repetitions: int, processor: bool = False
    ) -> list[float]:
        """Return the seconds of an operation for each repetition: the slowest rank's, for only then all are done.

        With ``processor``, the processor time of all ranks.
        """
        if processor:
            spent = self.ask(operation, nbytes, calls, repetitions, clock="process_time")
            return [sum(seconds) for seconds in zip(*spent, strict=True)]
        return [max(seconds) for seconds in zip(*self.ask(operation, nbytes, calls, repetitions), strict=True)]

    def ask(self, operation: str, nbytes: int, calls: float, repetitions: int, **options: str) -> list[list[Any]]:
        """Return what ``measure`` does, of every rank."""
        order: Message = {"operation": operation, "nbytes": nbytes, "calls": calls, "repetitions": repetitions}
        order |= options
        for channel in self._channels:
            try:
                channel.send(order)
            except ConnectionError:
                raise self._lost() from None
        return [self._answer(channel, ORDER_SECONDS)["seconds"] for channel in self._channels]

    def _accept(self, listener: socket.socket) -> None:
        """Wait until all ranks have connected and joined their world."""
        listener.settimeout(0.1)
        deadline = time.monotonic() + START_SECONDS
        while len(self._channels) < self.ranks:
            try:
                self._channels.append(Channel(listener.accept()[0]))
            except TimeoutError:
                if self._launcher.poll() is not None or time.monotonic() > deadline:
                    raise self._failed("did not start") from None
        hellos = sorted(
            (self._answer(channel, START_SECONDS) for channel in self._channels), key=lambda one: one["rank"]
        )
        if [hello["rank"] for hello in hellos] != list(range(self.ranks)):
            raise self._failed(f"did not become one world of {self.ranks}: {hellos}")
        self.version = hellos[0]["version"]

    def _answer(self, channel: Channel, timeout: float) -> Message:
        try:
            answer = channel.receive(timeout)
        except TimeoutError:
            raise self._failed(f"gave no answer for {timeout:g} s") from None
        if answer is None:
            raise self._lost()
        return answer

    def _lost(self) -> MeasurementError:
        """Return the error of a rank that is gone, once its launcher has passed on its output and ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(END_SECONDS)
        return self._failed("lost a rank")

    def _failed(self, what: str) -> MeasurementError:
        output = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        return MeasurementError(
            f"{self.implementation.title} with {self.ranks} ranks {what}. Its last output:\n{output}"
        )
