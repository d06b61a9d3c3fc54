"""Connections of a client: attempts until a busy server accepts one, and a pool, in which each call has its own."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import FramedStream, StreamClosedError

MAX_IDLE = 8
_ACCEPT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5

T = TypeVar("T")
C = TypeVar("C", bound=FramedStream)


def is_closed_early(error: BaseException | None) -> bool:
    """Return whether an error of a new connection is that a server which listens has closed it."""
    return isinstance(error, StreamClosedError | ConnectionResetError | BrokenPipeError)


def until_accepted(connect: Callable[[], T], deadline: Deadline) -> T:
    """Return what ``connect`` returns; repeat it while the server closes the connection early, with pauses.

    A server does so if more clients than its limit connect at a time. One that ends does so, too: then the next attempt
    finds that it does not listen. The attempts end after _ACCEPT_SECONDS in any case.
    """
    limit, pause = Deadline(min(deadline.remaining(), _ACCEPT_SECONDS)), _FIRST_PAUSE
    while True:
        try:
            return connect()
        except Exception as error:
            if not (is_closed_early(error) or is_closed_early(error.__cause__)) or limit.expired():
                raise
        time.sleep(min(pause * random.uniform(0.5, 1.5), limit.remaining()))  # many may have been refused
        pause = min(2 * pause, _LONGEST_PAUSE)


class ConnectionPool(Generic[C]):
    """Connections to one server. For several threads, without a lock: its lists and sets change atomically.

    ``closed_error`` returns the error of calls after ``close``.
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
