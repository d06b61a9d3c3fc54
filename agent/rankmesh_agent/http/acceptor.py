"""Acceptor of a port: the first bytes of a connection name the server that gets it, a service's or that of HTTP.

It needs neither an event loop nor a framework. So a process that imports something for seconds answers a request for
its snapshot, and a rank without HTTP clients does not import the framework.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.descriptors import is_exhausted, log_failure, warn_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import configure_connection
from rankmesh_agent.wire.hello import MOST_BYTES, PREFACE_BYTES, Service, Verdict, is_preface, service_of, welcome

HEAD_SECONDS = 10.0
"""Time limit for a client to send its first bytes, and then the rest of a head."""
_RETRY_SECONDS = 0.05
_FULL_SECONDS = 0.001
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Accepted(NamedTuple):
    """A connection that is not a service's, the first bytes that it has, and its place among those without a request.

    No byte has been read from it. The receiver ends its admission.
    """

    sock: socket.socket
    start: bytes
    admission: Admission


class Acceptor:
    """Accepts the connections of a port, and of unix sockets beside it, which bring connections of services alone.

    Args:
        port: a listening socket; its owner shuts it down to end ``run``, and closes it.
        unix_listeners: listening unix sockets, which their owner closes.
        services: serve the connections that begin with a PREFACE, which block from then on, and end their admission.
        prefaces: first bytes of the other protocols, besides HTTP and TLS.
    """

    def __init__(
        self,
        port: socket.socket,
        unix_listeners: Sequence[socket.socket],
        services: Mapping[Service, Callable[[socket.socket, Admission], None]],
        prefaces: Iterable[bytes],
        forward: Callable[[Accepted], object],
    ) -> None:
        self._port = port
        self._listeners = {listener.fileno(): listener for listener in (port, *unix_listeners)}
        self._services = services
        self._prefaces = tuple(prefaces)
        self._forward = forward
        self._limit = ConnectionLimit("connections whose clients have sent no request and no credential")
        self._undecided: dict[int, Admission] = {}  # oldest first
        self._poll = select.epoll()
        for listener in self._listeners.values():
            listener.setblocking(False)
            self._poll.register(listener, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the port is shut down."""
        port = self._port.fileno()
        try:
            while True:
                now = time.monotonic()
                for descriptor, event in self._poll.poll(self._seconds_left(now)):
                    if descriptor in self._undecided:
                        self._examine(descriptor, event)
                    elif descriptor == port and event & select.EPOLLHUP:
                        return
                    elif descriptor in self._listeners:
                        self._accept(self._listeners[descriptor])
                while self._seconds_left(now) == 0.0:  # it had sent too little at that time
                    self._close(next(iter(self._undecided)))
        finally:
            self.close()

    def close(self) -> None:
        """Close the epoll descriptor and the connections. Not while it runs."""
        for descriptor in list(self._undecided):
            self._close(descriptor)
        self._poll.close()

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds until the client that came first has run out of time, None if there is none."""
        for admission in self._undecided.values():
            return max(0.0, admission.since + HEAD_SECONDS - now)
        return None

    def _remove(self, descriptor: int) -> Admission:
        """Return a connection that is undecided no more."""
        self._poll.unregister(descriptor)
        return self._undecided.pop(descriptor)

    def _close(self, descriptor: int) -> None:
        admission = self._remove(descriptor)
        admission.end()
        admission.sock.close()

    def _accept(self, listener: socket.socket) -> None:
        if not self._limit.make_room():
            time.sleep(_FULL_SECONDS)
            return
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if is_exhausted(error):
                warn_exhausted("a client waits", error)
            if error.errno in _NO_ROOM:
                time.sleep(_RETRY_SECONDS)  # the client stays in the backlog: an immediate retry would only spin
            return
        close_in_children(sock).setblocking(False)
        self._undecided[sock.fileno()] = self._limit.admit(sock)
        # Edge-triggered: the first bytes stay in the socket.
        self._poll.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def _examine(self, descriptor: int, event: int) -> None:
        """Look at what a client has sent, and have it served if that suffices."""
        admission = self._undecided[descriptor]
        sock = admission.sock
        try:
            start = sock.recv(PREFACE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            start = b""
        admission.peeked = len(start)
        kind = is_preface(start)
        if start and kind is not None and not any(each != start and each.startswith(start) for each in self._prefaces):
            self._serve(self._remove(descriptor), start, is_service=kind)
        elif not start or event & select.EPOLLRDHUP:
            with contextlib.suppress(OSError):
                sock.recv(PREFACE_BYTES)  # with unread bytes, the close would be a reset
            self._close(descriptor)  # else too few bytes have come to decide

    def _serve(self, admission: Admission, start: bytes, *, is_service: bool) -> None:
        sock, admission.peeked = admission.sock, 0
        try:
            if is_service:
                configure_connection(sock)
                sock.setblocking(True)
                service = service_of(start)
                handler = None if service is None else self._services.get(service)
                if handler is not None:
                    handler(sock, admission)
                    return
                sock.recv(MOST_BYTES)
                sock.send(welcome(Verdict.OTHER_SERVICE), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            elif sock.family != socket.AF_UNIX:
                self._forward(Accepted(sock, start, admission))
                return
        except Exception as error:
            log_failure("a client cannot be served", error)
        admission.end()
        with contextlib.suppress(OSError):
            sock.close()
