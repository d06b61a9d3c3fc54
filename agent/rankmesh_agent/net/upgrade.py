"""Client side of the HTTP Upgrade: a connection to an HTTP port switches to another protocol."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from rankmesh_agent.net import tls
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.wire.upgrade import Upgrade, is_complete

_READ_BYTES = 1 << 14


def connect_upgraded(
    url: str, upgrade: Upgrade, token: str, *, connect_seconds: float, seconds: float
) -> tuple[socket.socket, bytes]:
    """Connect to an HTTP server and switch to another protocol.

    Args:
        url: base URL of the server.
        upgrade: the protocol. The server must not send anything in it before the client does.
        token: this process's credential; empty for none.
        connect_seconds: maximum duration of the connect.
        seconds: timeout of each receive; the socket keeps it.

    Returns:
        The socket, and the head of the server's response.

    Raises:
        ValueError: the URL is not of the form http://host:port, or without TLS where that is required.
        AuthenticationError: the server's certificate is not accepted.
        OSError: the server cannot be reached, or ends the connection (ConnectionResetError).
        ProtocolError: the server does not know the protocol.
    """
    split = urlsplit(url)
    if not split.hostname:
        raise ValueError("the URL is not of the form http://host:port")
    sock = tls.connect(split.scheme, split.hostname, split.port, connect_seconds, token)
    try:
        head = request_upgrade(sock, upgrade, split.netloc, seconds)
    except BaseException:
        sock.close()
        raise
    return sock, head


def request_upgrade(sock: socket.socket, upgrade: Upgrade, host: str, seconds: float) -> bytes:
    """Switch a connection to an HTTP server to another protocol.

    Args:
        sock: the connection.
        upgrade: the protocol. The server must not send anything in it before the client does.
        host: the server's host and port, as in its URL.
        seconds: timeout of each receive; the socket keeps it.

    Returns:
        The head of the server's response.

    Raises:
        OSError: the server sends nothing (TimeoutError), or ends the connection (ConnectionResetError).
        ProtocolError: the server does not know the protocol.
    """
    sock.settimeout(seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    break_when_peer_vanishes(sock)
    sock.sendall(upgrade.request(host))
    head = b""
    while not is_complete(head):
        received = sock.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        head += received
    return head
