"""One client's connection to the store's server."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.store.command import Waiting
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.hello import Client
from rankmesh_agent.wire.store_frames import HEADER_BYTES, Frame, RequestId


class PendingRequest(NamedTuple):
    """A request that waits for its response."""

    seq: int
    command: Waiting[Any]
    table: Table
    future: Future[Any]
    request_id: RequestId


class Connection:
    """The server's end of a connection, with at most one request in progress.

    Attributes:
        handshake: the handshake in progress, None once the client has passed it.
        admission: its place among the unauthenticated connections during the handshake.
        name: its name at both ends, by which a client identifies it after it broke.
        table: the keys and values of the client's store, after the handshake; None if the server has no such one.
        wanted: number of bytes that make the next request.
        received: those of them that have come.
        pending: the request that waits; the thread that takes it, under the lock, sends the response.
        last: number of the last request that changed something, and the response.
        due: when ``on_due`` is called, by the monotonic clock; None stands for nothing to call.
        lock: prevents closing while another thread sends.
    """

    def __init__(
        self, sock: socket.socket, poll: select.epoll, handshake: Handshake[Client], admission: Admission
    ) -> None:
        self.sock = sock
        self.handshake: Handshake[Client] | None = handshake
        self.admission = admission
        self.due = 0.0
        self.on_due: Callable[[], object] | None = None
        self.name = b""
        self.table: Table | None = None
        self.wanted = HEADER_BYTES
        self.received = bytearray()
        self.unsent: memoryview | None = None
        self.pending: PendingRequest | None = None
        self.last: tuple[int, Frame] | None = None
        self.lock = threading.RLock()
        self._poll = poll

    def send(self, frame: Frame) -> None:
        """Send, now or as soon as the socket's buffer has room."""
        try:
            sent = self.sock.send(frame, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self.unsent = memoryview(frame)[sent:]
            self._poll.modify(self.sock, select.EPOLLOUT)

    def flush(self) -> None:
        """Send more of what the socket's buffer did not take before."""
        assert self.unsent is not None
        self.unsent = self.unsent[self.sock.send(self.unsent, socket.MSG_NOSIGNAL) :]
        if not self.unsent:
            self.unsent = None
            self._poll.modify(self.sock, select.EPOLLIN)

    def take_pending(self, request: PendingRequest | None = None) -> PendingRequest | None:
        """Return the pending request, which the caller has to answer; None if there is none, or not ``request``."""
        with self.lock:
            found = self.pending
            if found is None or (request is not None and found is not request):
                return None
            self.pending = self.on_due = None
            return found

    def shut_down(self) -> None:
        """Make the server's thread close the connection. From any thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
