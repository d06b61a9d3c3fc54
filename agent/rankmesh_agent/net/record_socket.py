"""Sockets whose bytes travel in records: encrypted by TLS, or with a MAC."""

from __future__ import annotations

import socket
from typing import Any

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of a send that raises no SIGPIPE; other systems than Linux lack it, and Python ignores the signal."""


class RecordChangedError(ConnectionError):
    """A record is not the one that the peer has sent: the connection has ended, by an attack or an error of memory."""


class RecordSocket(socket.socket):
    """A connected socket with the calls and flags of a socket: in place of one, it needs no other code.

    ``send`` reports the bytes whose records the kernel has taken. Those of further records are sealed, too: the next
    call must begin with them (see ``committed``). Bytes may be ready although the descriptor is not readable: a receive
    that returns fewer bytes than it could leaves none; else see ``buffered``.

    One thread may send while another one receives.

    Args:
        sock: the socket, which this object takes over.
    """

    def __init__(self, sock: socket.socket) -> None:
        timeout = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout)

    # Not an abstract base class: isinstance() of each call would take five times as long.

    def committed(self) -> int:
        """Return how many bytes have been sealed, but not reported: the next ``send`` must begin with them."""
        raise NotImplementedError

    def buffered(self) -> bool:
        """Return whether bytes can be received although the descriptor may not be readable."""
        raise NotImplementedError

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view, flags) :]


def buffered(sock: socket.socket) -> bool:
    """Return whether bytes can be received from a socket although its descriptor may not be readable."""
    return isinstance(sock, RecordSocket) and sock.buffered()


def committed(sock: socket.socket) -> int:
    """Return how many bytes a socket has sealed, but not reported: the next ``send`` must begin with them."""
    return sock.committed() if isinstance(sock, RecordSocket) else 0
