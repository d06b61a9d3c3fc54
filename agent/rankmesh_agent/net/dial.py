"""Connections to servers, with TLS where they need it; its handshake has not begun."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.tls import DEFAULT_PORTS, check_scheme, client_side, secured


def connect(scheme: str, host: str, port: int | None, seconds: float, token: str = "") -> socket.socket:
    """Return a connection to a server: with TLS if the scheme is https, or if ``secured`` finds that it needs it.

    A PREFACE may precede the handshake of TLS (``wire.hello``).

    Args:
        scheme: ``http`` or ``https``.
        host: name or address of the server.
        port: its port; None for the scheme's.
        seconds: timeout of each step; the socket keeps it.
        token: this process's credential; empty for none.

    Raises:
        ValueError: the scheme is another one, or http where RANKMESH_TLS=require.
        OSError: the server cannot be reached.
    """
    check_scheme(scheme, f"{scheme}://{host}")
    port = port or DEFAULT_PORTS[scheme]
    sock = close_in_children(socket.create_connection((host, port), seconds))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client_side(sock, host, port) if scheme == "https" else secured(sock, host, sock.getpeername(), token)
    except BaseException:
        sock.close()
        raise


def connect_to(url: str, seconds: float, token: str) -> socket.socket:
    """Return a connection to the server of a base URL; see ``connect``.

    Raises:
        ValueError: the URL is not of the form http://host:port, or see ``connect``.
        OSError: see ``connect``.
    """
    split = urlsplit(url)
    if not split.hostname:
        raise ValueError("the URL is not of the form http://host:port")
    sock = connect(split.scheme, split.hostname, split.port, seconds, token)
    break_when_peer_vanishes(sock)
    return sock
