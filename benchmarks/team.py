"""The ranks of one peer, as seen from the benchmark: start them, give orders, end them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from benchmarks.channel import Channel, Message
from benchmarks.peers import Peer

ROOT = Path(__file__).resolve().parent.parent

RANKS_VARIABLE = "BENCHMARK_RANKS"
"""The environment variable that tells a program how many there are, for one that its launcher does not tell."""
START_DEADLINE = 90.0
ORDER_DEADLINE = 90.0
END_DEADLINE = 15.0
"""Seconds: for all ranks to join, to carry out an order, to end."""


class PeerFailedError(RuntimeError):
    """A peer's ranks did not start, died, gave a wrong result or took too long."""


class Team:
    """The ranks of one peer, alive from ``with Team(...) as team`` to the end of the block.

    Args:
        peer: whose ranks.
        ranks: how many.

    Attributes:
        version: of the library, in words.
    """

    def __init__(self, peer: Peer, ranks: int) -> None:
        self.peer = peer
        self.ranks = ranks
        self.version = ""
        self._channels: list[Channel] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="rankmesh-bench-")
        path, self._log = Path(self._folder.name, "socket"), Path(self._folder.name, "output")
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as output:
            listener.bind(str(path))
            listener.listen(self.ranks)
            self._launcher = subprocess.Popen(
                self.peer.command(self.ranks, "-m", self.peer.program, self.peer.library, str(path)),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", RANKS_VARIABLE: str(self.ranks), **self.peer.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                self._welcome(listener)
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def measure(self, operation: str, nbytes: int, calls: float, repetitions: int) -> list[float]:
        """Return the seconds an operation takes, for each repetition: the slowest rank's, for only then all are done.

        Raises:
            PeerFailedError: a rank died, found a wrong result or took too long.
        """
        answers = self.ask(operation, nbytes, calls, repetitions)
        return [max(seconds) for seconds in zip(*answers, strict=True)]

    def ask(self, operation: str, nbytes: int, calls: float, repetitions: int) -> list[list[float]]:
        """Return what ``measure`` does, of every rank."""
        order: Message = {"operation": operation, "nbytes": nbytes, "calls": calls, "repetitions": repetitions}
        for channel in self._channels:
            try:
                channel.send(order)
            except ConnectionError:
                raise self._loss() from None
        return [self._answer(channel, ORDER_DEADLINE)["seconds"] for channel in self._channels]

    def _welcome(self, listener: socket.socket) -> None:
        """Wait until all ranks have connected and joined their world."""
        listener.settimeout(0.1)
        deadline = time.monotonic() + START_DEADLINE
        while len(self._channels) < self.ranks:
            try:
                self._channels.append(Channel(listener.accept()[0]))
            except TimeoutError:
                if self._launcher.poll() is not None or time.monotonic() > deadline:
                    raise self._failure("did not start") from None
        hellos = [self._answer(channel, START_DEADLINE) for channel in self._channels]
        if sorted(hello["rank"] for hello in hellos) != list(range(self.ranks)):
            raise self._failure(f"did not become one world of {self.ranks}: {hellos}")
        self.version = next(hello["version"] for hello in hellos if hello["rank"] == 0)

    def _answer(self, channel: Channel, timeout: float) -> Message:
        try:
            answer = channel.receive(timeout)
        except TimeoutError:
            raise self._failure(f"gave no answer for {timeout:g} s") from None
        if answer is None:
            raise self._loss()
        return answer

    def _loss(self) -> PeerFailedError:
        """Return the error of a rank that is gone, when its launcher has passed on its last words and ended, too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(END_DEADLINE)
        return self._failure("lost a rank")

    def _failure(self, what: str) -> PeerFailedError:
        last_words = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        return PeerFailedError(f"{self.peer.title} with {self.ranks} ranks {what}. Its last words:\n{last_words}")

    def _end(self) -> None:
        """Close the sockets, upon which the ranks end by themselves; terminate the launcher if that takes too long.

        Launchers take their ranks with them; a rank that outlives even that has its own alarm.
        """
        for channel in self._channels:
            channel.close()
        for last_resort in (self._launcher.terminate, self._launcher.kill):
            try:
                self._launcher.wait(END_DEADLINE)
            except subprocess.TimeoutExpired:
                last_resort()
        self._launcher.wait()
        self._folder.cleanup()
