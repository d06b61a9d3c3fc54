"""Connection pool: each call uses a connection of its own, so calls of several threads do not wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from rankmesh_agent.net.stream import FramedStream

MAX_IDLE = 8
"""Connections that are kept while no call uses them."""


C = TypeVar("C", bound=FramedStream)


class ConnectionPool(Generic[C]):
    """Connections to one server. For several threads, without a lock: its lists and sets change atomically.

    Args:
        closed_error: returns the error of calls after ``close``.
    """

    def __init__(self, closed_error: Callable[[], Exception]) -> None:
        self._closed_error = closed_error
        self._idle: list[C] = []
        self._all: set[C] = set()
        self.closed = False

    def acquire(self, connect: Callable[[], C]) -> C:
        """Return an idle connection, or else a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return self.connect(connect)

    def connect(self, connect: Callable[[], C]) -> C:
        """Return a new connection."""
        if self.closed:
            raise self._closed_error()
        connection = connect()
        self._all.add(connection)
        if self.closed:  # meanwhile, perhaps before close() could see this connection
            self.discard(connection)
            raise self._closed_error()
        return connection

    def release(self, connection: C) -> None:
        """Keep a connection for the next call."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
            if self.closed:
                self._discard_idle()
        else:
            self.discard(connection)

    def discard(self, connection: C) -> None:
        """Close a connection whose call has failed, so that no later call receives its response."""
        self._all.discard(connection)
        connection.close()

    def in_use(self) -> list[C]:
        """Return the connections that calls use."""
        idle = set(self._idle)
        return [connection for connection in list(self._all) if connection not in idle]

    def close(self) -> None:
        """End all connections; calls in progress fail, and their threads close their connections."""
        self.closed = True
        for connection in list(self._all):
            connection.shutdown()
        self._discard_idle()

    def _discard_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.discard(self._idle.pop())
