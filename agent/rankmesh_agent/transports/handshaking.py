"""Driver of handshakes: any number of them run in one thread, without blocking.

One side of a handshake is a *script*: a generator that yields the bytes to send and the number of bytes to receive,
is sent these, and returns the connection. It reads like blocking code, and closing it undoes what it has begun.
"""

from __future__ import annotations

import select
from collections.abc import Generator

from rankmesh_agent.transports.base import Connection, PendingConnection
from rankmesh_agent.wire.errors import DistNetworkError

Script = Generator[tuple[bytes, int], bytes, Connection]
"""Yields what to say and how many bytes to hear; an error of the connection is thrown into it."""


class Handshake(PendingConnection):
    """One side of a conversation.

    Args:
        connection: what carries the words.
        script: this side's part.
    """

    def __init__(self, connection: Connection, script: Script) -> None:
        self.connection = connection
        self.started = False
        """Whether anything has been said or heard."""
        self._script = script
        self._take(next(script))

    def _take(self, line: tuple[bytes, int]) -> None:
        saying, hearing = line
        self._unsaid = memoryview(saying)
        self._heard = bytearray(hearing)
        self._unheard = memoryview(self._heard)

    def fileno(self) -> int:
        return self.connection.fileno()

    def events(self) -> int:
        return select.POLLOUT if self._unsaid else select.POLLIN

    def advance(self) -> Connection | None:
        """Say and hear what can be said and heard now; see Attempt.advance. Who has just spoken does not listen yet."""
        try:
            while True:
                if self._unsaid:
                    self._say()
                    if self._unsaid or self._unheard:
                        return None
                if self._unheard and not self._hear():
                    return None
                self._take(self._script.send(bytes(self._heard)))
        except StopIteration as end:
            connection: Connection = end.value
            return connection

    def _say(self) -> None:
        sent = self.connection.send([self._unsaid])
        self._unsaid = self._unsaid[sent:]
        self.started = self.started or sent > 0

    def _hear(self) -> bool:
        """Return whether all of what comes next is here."""
        try:
            received = self.connection.recv_into(self._unheard)
        except DistNetworkError as error:
            self._script.throw(error)
            raise AssertionError("a script that goes on without its connection") from error
        self._unheard = self._unheard[received:]
        self.started = self.started or received > 0
        return not self._unheard

    def close(self) -> None:
        self._script.close()
        self.connection.close()
