"""Services at an HTTP port, and the acceptor of a port whose HTTP server is not loaded yet.

A rank gets its diagnosis also from a process that is busy, or imports something for seconds: without an import.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rankmesh_agent.net.admission import UNAUTHENTICATED, Admission
from rankmesh_agent.net.descriptors import is_exhausted, log_failure, warn_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.wire.hello import MOST_BYTES, PREFACE_BYTES, Service, Verdict, is_preface, service_of, welcome

HEAD_SECONDS = 10.0
"""Time limit for a client to send its head."""
_RETRY_SECONDS = 0.05
_FULL_SECONDS = 0.001
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class _Client(NamedTuple):
    """A client that has not sent a whole head, and when it connected."""

    sock: socket.socket
    admission: Admission
    since: float


class Services:
    """The services at a port, besides HTTP.

    Args:
        handlers: serve the connections of each service.
    """

    def __init__(self, handlers: Mapping[Service, Callable[[socket.socket], None]]) -> None:
        self._handlers = handlers

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._handlers)

    def serve(self, sock: socket.socket, start: bytes) -> None:
        """Serve a connection, which blocks from now on.

        Args:
            sock: the connection, from which no byte has been read.
            start: its PREFACE.
        """
        service = service_of(start)
        handler = None if service is None else self._handlers.get(service)
        try:
            sock.setblocking(True)
            if handler is not None:
                handler(sock)
                return
            sock.recv(MOST_BYTES)
            sock.send(welcome(Verdict.OTHER_SERVICE), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except Exception as error:
            log_failure("a client of a service cannot be served", error)
        with contextlib.suppress(OSError):
            sock.close()


class PrefaceAcceptor:
    """Accepts the connections of a port until one needs an HTTP server.

    Args:
        listener: a listening socket; its owner shuts it down to end ``run``, and closes it.
        services: the services at the port.
    """

    def __init__(self, listener: socket.socket, services: Services) -> None:
        self._listener = listener
        self._services = services
        self._undecided: dict[int, _Client] = {}  # oldest first
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)

    def run(self) -> list[socket.socket]:
        """Serve until a client needs an HTTP server, or the listener is shut down.

        Returns:
            The accepted connections, from which no byte has been read; the caller owns them.
        """
        self._listener.setblocking(False)
        listener = self._listener.fileno()
        with self._poll:
            while True:
                now = time.monotonic()
                for descriptor, event in self._poll.poll(self._seconds_left(now)):
                    if descriptor != listener:
                        needs_http = self._examine(descriptor, event)
                    elif event & select.EPOLLHUP or not self._services:
                        needs_http = True
                    else:
                        needs_http = False
                        self._accept()
                    if needs_http:
                        for client in self._undecided.values():
                            client.admission.end()
                        return [client.sock for client in self._undecided.values()]
                while self._seconds_left(now) == 0.0:  # it had sent too little at that time
                    self._remove(next(iter(self._undecided.values())).sock).close()

    def close(self) -> None:
        """Close the epoll descriptor, and the connections that have not been handed over. Not while it runs."""
        self._poll.close()
        for client in self._undecided.values():
            client.admission.end()
            client.sock.close()

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds until the client that came first has run out of time, None if there is none."""
        for client in self._undecided.values():
            return max(0.0, client.since + HEAD_SECONDS - now)
        return None

    def _remove(self, sock: socket.socket) -> socket.socket:
        """Return a client that is undecided no more."""
        self._poll.unregister(sock)
        self._undecided.pop(sock.fileno()).admission.end()
        return sock

    def _accept(self) -> None:
        """Accept a connection."""
        if not UNAUTHENTICATED.has_room():
            time.sleep(_FULL_SECONDS)
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if is_exhausted(error):
                warn_exhausted("a client of the HTTP port waits", error)
            if error.errno in _NO_ROOM:
                time.sleep(_RETRY_SECONDS)  # the client stays in the backlog: an immediate retry would only spin
            return
        close_in_children(sock).setblocking(False)
        self._undecided[sock.fileno()] = _Client(sock, UNAUTHENTICATED.admit(sock), time.monotonic())
        # Edge-triggered: the bytes of an incomplete head stay in the socket.
        self._poll.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def _examine(self, descriptor: int, event: int) -> bool:
        """Look at what a client has sent; return whether it needs an HTTP server."""
        sock = self._undecided[descriptor].sock
        try:
            start = sock.recv(PREFACE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            start = b""
        self._undecided[descriptor].admission.peeked = len(start)
        found = is_preface(start) if start else None
        if found is False:
            return True
        if found:
            self._services.serve(self._remove(sock), start)
        elif not start or event & select.EPOLLRDHUP:
            self._remove(sock).close()
        return False  # else too few bytes have come to decide
