"""Transport between threads of one process: two bounded byte queues, without sockets. For tests and for teaching."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Container, Sequence
from typing import ClassVar

from rankmesh_agent.transports.base import (
    IDENTITY_BYTES,
    Admit,
    Buffer,
    Connection,
    Listener,
    PendingConnection,
    Transport,
    connection_lost,
)
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError

QUEUE_BYTES = 1 << 20


class _Queue:
    """The bytes in flight in one direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False


class InprocConnection(Connection):
    """One end of two queues, with an eventfd to sleep on."""

    medium: ClassVar[str] = "inproc"
    peer = "the peer in this process"

    def __init__(
        self, incoming: _Queue, outgoing: _Queue, eventfd: int, peer_eventfd: int, lock: threading.Lock
    ) -> None:
        self._lock = lock  # shared by both ends
        self._incoming = incoming
        self._outgoing = outgoing
        self._eventfd = eventfd
        self._peer_eventfd = peer_eventfd
        self._open = True

    def send(self, buffers: Sequence[Buffer]) -> int:
        sent = 0
        with self._lock:
            if self._incoming.closed or not self._open:  # the peer has closed, or this end
                raise connection_lost(self.peer)
            for buffer in buffers:
                piece = memoryview(buffer).cast("B")[: QUEUE_BYTES - len(self._outgoing.data)]
                self._outgoing.data += piece
                sent += len(piece)
            if sent:
                os.eventfd_write(self._peer_eventfd, 1)
        return sent

    def recv_into(self, buffer: memoryview) -> int:
        with self._lock:
            if not self._open:
                raise connection_lost(self.peer, "closed here")
            received = min(len(buffer), len(self._incoming.data))
            if not received:
                if self._incoming.closed:
                    raise connection_lost(self.peer)
                return 0
            buffer[:received] = self._incoming.data[:received]
            del self._incoming.data[:received]
            if not self._incoming.closed:
                os.eventfd_write(self._peer_eventfd, 1)
        return received

    def fileno(self) -> int:
        return self._eventfd

    def events(self, writing: bool) -> int:
        return select.POLLIN

    def has_work(self, writing: bool) -> bool:
        if self._incoming.data or self._incoming.closed:
            return True
        return writing and len(self._outgoing.data) < QUEUE_BYTES

    def prepare_wait(self, writing: bool) -> bool:
        return not self.has_work(writing)

    def on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._outgoing.closed = True
            if self._incoming.closed:  # both ends are closed now
                os.close(self._eventfd)
                os.close(self._peer_eventfd)
            else:
                os.eventfd_write(self._peer_eventfd, 1)

    def close_in_child(self) -> None:
        os.close(self._eventfd)

    def wake_peer(self) -> None:
        """Wake the other end, unless it is closed."""
        with self._lock:
            if not self._incoming.closed:
                os.eventfd_write(self._peer_eventfd, 1)


def connected_pair() -> tuple[InprocConnection, InprocConnection]:
    """Return two connected ends."""
    forward, backward = _Queue(), _Queue()
    first, second = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    lock = threading.Lock()
    return InprocConnection(backward, forward, first, second, lock), InprocConnection(
        forward, backward, second, first, lock
    )


class PendingInprocConnection(PendingConnection):
    """A client's end, until the listener has accepted or rejected it."""

    def __init__(self, connection: InprocConnection) -> None:
        self.connection = connection
        self.admitted = False

    def fileno(self) -> int:
        return self.connection.fileno()

    def events(self) -> int:
        return select.POLLIN

    def advance(self) -> Connection | None:
        self.connection.on_wakeup()
        if self.admitted:
            return self.connection
        self.connection.recv_into(memoryview(b""))  # raises if the listener has closed its end
        return None

    def close(self) -> None:
        self.connection.close()


class InprocListener(Listener):
    """A listener, registered by address in its transport."""

    def __init__(self, address: str, listeners: dict[str, InprocListener]) -> None:
        self.address = address
        self._backlog: deque[tuple[bytes, InprocConnection, PendingInprocConnection]] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._listeners = listeners

    def descriptors(self) -> list[int]:
        return [self._eventfd]

    def enqueue(self, identity: bytes, connection: InprocConnection, pending: PendingInprocConnection) -> None:
        """Append the listener's end of a client's connection to the backlog."""
        with self._lock:
            if self._closed:
                raise _no_listener(self.address)
            self._backlog.append((identity, connection, pending))
            os.eventfd_write(self._eventfd, 1)

    def accept(self, ready: Container[int], admits: Admit) -> list[tuple[bytes, Connection]]:
        arrived: list[tuple[bytes, Connection]] = []
        with self._lock:
            if self._closed:
                raise DistNetworkError(f"the listener at {self.address} is closed", address=self.address)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
            backlog, self._backlog = self._backlog, deque()
        for identity, connection, pending in backlog:
            if admits(identity):
                pending.admitted = True
                connection.wake_peer()
                arrived.append((identity, connection))
            else:
                connection.close()
        return arrived

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            del self._listeners[self.address]
            os.close(self._eventfd)
        for _, connection, _ in self._backlog:
            connection.close()

    @property
    def _closed(self) -> bool:
        return self._listeners.get(self.address) is not self


class InprocTransport(Transport):
    """Transport to the listeners of this object; it needs no authentication."""

    def __init__(self) -> None:
        self._listeners: dict[str, InprocListener] = {}

    def listen(self, address: str) -> Listener:
        listener = InprocListener(address, self._listeners)
        if self._listeners.setdefault(address, listener) is not listener:
            os.close(*listener.descriptors())
            raise AddressInUseError(f"{address} is in use in this process", address=address)
        return listener

    def dial(self, address: str, identity: bytes = b"") -> PendingConnection:
        listener = self._listeners.get(address)
        if listener is None:
            raise _no_listener(address)
        here, there = connected_pair()
        pending = PendingInprocConnection(here)
        try:
            listener.enqueue(identity.ljust(IDENTITY_BYTES, b"\0"), there, pending)
        except BaseException:
            here.close()
            there.close()
            raise
        return pending


def _no_listener(address: str) -> DistNetworkError:
    return DistNetworkError(f"cannot connect to {address}: no listener there", address=address)
