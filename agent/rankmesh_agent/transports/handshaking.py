"""Driver of handshakes: any number of them run in one thread, without blocking.

One side of a handshake is a *script*: a generator that yields the bytes to send and the number of bytes to receive,
gets the received bytes from ``send()``, and returns the connection. It reads like blocking code; closing it releases
its resources.
"""

from __future__ import annotations

import select
from collections.abc import Generator

from rankmesh_agent.transports.base import Connection, PendingConnection
from rankmesh_agent.wire.errors import DistNetworkError

Script = Generator[tuple[bytes, int], bytes, Connection]
"""Yields the bytes to send and the number of bytes to receive. An error of the connection is thrown into it."""


class Handshake(PendingConnection):
    """One side of a handshake.

    Args:
        connection: the connection that carries it.
        script: this side's script.
    """

    def __init__(self, connection: Connection, script: Script) -> None:
        self.connection = connection
        self.started = False
        """True if any byte has been sent or received."""
        self._script = script
        self._begin_step(next(script))

    def _begin_step(self, step: tuple[bytes, int]) -> None:
        outgoing, expected = step
        self._unsent = memoryview(outgoing)
        self._received = bytearray(expected)
        self._unfilled = memoryview(self._received)

    def fileno(self) -> int:
        return self.connection.fileno()

    def events(self) -> int:
        return select.POLLOUT if self._unsent else select.POLLIN

    def advance(self) -> Connection | None:
        """Continue as far as possible; see PendingConnection.advance. A call that sends does not receive yet."""
        try:
            while True:
                if self._unsent:
                    self._send()
                    if self._unsent or self._unfilled:
                        return None
                if self._unfilled and not self._receive():
                    return None
                self._begin_step(self._script.send(bytes(self._received)))
        except StopIteration as end:
            connection: Connection = end.value
            return connection

    def _send(self) -> None:
        sent = self.connection.send([self._unsent])
        self._unsent = self._unsent[sent:]
        self.started = self.started or sent > 0

    def _receive(self) -> bool:
        """Return whether all bytes of this step have arrived."""
        try:
            received = self.connection.recv_into(self._unfilled)
        except DistNetworkError as error:
            self._script.throw(error)
            raise AssertionError("a script continued without its connection") from error
        self._unfilled = self._unfilled[received:]
        self.started = self.started or received > 0
        return not self._unfilled

    def close(self) -> None:
        self._script.close()
        self.connection.close()
