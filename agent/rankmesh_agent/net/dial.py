"""Connections to servers: over TCP, with TLS where they need it, and over unix sockets."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.peer_credentials import check_peer
from rankmesh_agent.net.sockets import configure_connection
from rankmesh_agent.net.tls import DEFAULT_PORTS, check_scheme, client_side, secured


def connect(url: str, seconds: float, token: str = "") -> socket.socket:
    """Return a connection to the server of a URL: with TLS if the scheme is https, or where ``secured`` demands it.

    The handshake of TLS has not begun: a PREFACE may precede it (``wire.hello``). The socket keeps the timeout.

    Raises:
        ValueError: the URL is invalid, or without TLS where RANKMESH_TLS=require.
        OSError: the server cannot be reached.
    """
    split = urlsplit(url)
    check_scheme(split.scheme, url)
    host, port = split.hostname, split.port or DEFAULT_PORTS[split.scheme]
    if not host:
        raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
    sock = close_in_children(socket.create_connection((host, port), seconds))
    try:
        configure_connection(sock)
        if split.scheme == "https":
            return client_side(sock, host, port)
        return secured(sock, host, sock.getpeername(), token)
    except BaseException:
        sock.close()
        raise


def connect_unix(address: str) -> socket.socket:
    """Return a connection to a unix socket of a process of this user or of root, which may see this process's token."""
    sock = close_in_children(socket.socket(socket.AF_UNIX))
    try:
        sock.setblocking(False)  # a full backlog is an error, and no wait without a limit
        sock.connect(address)
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock
