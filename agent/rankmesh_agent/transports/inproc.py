"""Ranks as threads of one process: two bounded queues of bytes, without sockets. For tests and for teaching."""

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
    """Bytes on their way from one end to the other."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False


class InprocConnection(Connection):
    """One end of two queues, with an eventfd to sleep on."""

    medium: ClassVar[str] = "inproc"
    peer = "the other end in this process"

    def __init__(self, incoming: _Queue, outgoing: _Queue, bell: int, other_bell: int, lock: threading.Lock) -> None:
        self._lock = lock  # both ends have the same
        self._incoming = incoming
        self._outgoing = outgoing
        self._bell = bell
        self._other_bell = other_bell
        self._open = True

    def send(self, buffers: Sequence[Buffer]) -> int:
        sent = 0
        with self._lock:
            if self._incoming.closed or not self._open:  # the other side has closed, or this one
                raise connection_lost(self.peer)
            for buffer in buffers:
                piece = memoryview(buffer).cast("B")[: QUEUE_BYTES - len(self._outgoing.data)]
                self._outgoing.data += piece
                sent += len(piece)
            if sent:
                os.eventfd_write(self._other_bell, 1)
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
                os.eventfd_write(self._other_bell, 1)
        return received

    def fileno(self) -> int:
        return self._bell

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
            os.eventfd_read(self._bell)

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._outgoing.closed = True
            if self._incoming.closed:  # the last one out
                os.close(self._bell)
                os.close(self._other_bell)
            else:
                os.eventfd_write(self._other_bell, 1)

    def close_in_child(self) -> None:
        os.close(self._bell)

    def wake_peer(self) -> None:
        """Wake the other end, if it is there."""
        with self._lock:
            if not self._incoming.closed:
                os.eventfd_write(self._other_bell, 1)


def connected_pair() -> tuple[InprocConnection, InprocConnection]:
    """Return two connected ends."""
    there, back = _Queue(), _Queue()
    mine, yours = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    lock = threading.Lock()
    return InprocConnection(back, there, mine, yours, lock), InprocConnection(there, back, yours, mine, lock)


class PendingInprocConnection(PendingConnection):
    """A client's end, until the listener has looked at it."""

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
        self.connection.recv_into(memoryview(b""))  # raises if the listener has closed the other end
        return None

    def close(self) -> None:
        self.connection.close()


class InprocListener(Listener):
    """A name in the transport's table."""

    def __init__(self, address: str, listeners: dict[str, InprocListener]) -> None:
        self.address = address
        self._waiting: deque[tuple[bytes, InprocConnection, PendingInprocConnection]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._listeners = listeners

    def descriptors(self) -> list[int]:
        return [self._bell]

    def wait(self, greeting: bytes, connection: InprocConnection, attempt: PendingInprocConnection) -> None:
        """Put the other end of a client's connection in the queue."""
        with self._lock:
            if self._closed:
                raise _nobody(self.address)
            self._waiting.append((greeting, connection, attempt))
            os.eventfd_write(self._bell, 1)

    def accept(self, ready: Container[int], admits: Admit) -> list[tuple[bytes, Connection]]:
        arrived: list[tuple[bytes, Connection]] = []
        with self._lock:
            if self._closed:
                raise DistNetworkError(f"the listener at {self.address} is closed", address=self.address)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            waiting, self._waiting = self._waiting, deque()
        for greeting, connection, attempt in waiting:
            if admits(greeting):
                attempt.admitted = True
                connection.wake_peer()
                arrived.append((greeting, connection))
            else:
                connection.close()
        return arrived

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            del self._listeners[self.address]
            os.close(self._bell)
        for _, connection, _ in self._waiting:
            connection.close()

    @property
    def _closed(self) -> bool:
        return self._listeners.get(self.address) is not self


class InprocTransport(Transport):
    """Reaches listeners of this very object; nobody has to prove anything."""

    def __init__(self) -> None:
        self._listeners: dict[str, InprocListener] = {}

    def listen(self, address: str) -> Listener:
        listener = InprocListener(address, self._listeners)
        if self._listeners.setdefault(address, listener) is not listener:
            os.close(*listener.descriptors())
            raise AddressInUseError(f"{address} is in use in this process", address=address)
        return listener

    def dial(self, address: str, greeting: bytes = b"") -> PendingConnection:
        listener = self._listeners.get(address)
        if listener is None:
            raise _nobody(address)
        here, there = connected_pair()
        attempt = PendingInprocConnection(here)
        try:
            listener.wait(greeting.ljust(IDENTITY_BYTES, b"\0"), there, attempt)
        except BaseException:
            here.close()
            there.close()
            raise
        return attempt


def _nobody(address: str) -> DistNetworkError:
    return DistNetworkError(f"cannot connect to {address}: nobody listens there", address=address)
