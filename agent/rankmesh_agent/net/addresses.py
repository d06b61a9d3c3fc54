"""Addresses of the two ends of a connection."""

from __future__ import annotations

import socket

from rankmesh_agent.config.addresses import is_loopback


def peer_name(sock: socket.socket) -> str:
    """Return the address of the other end of a connection, for the log."""
    try:
        address = sock.getpeername()
    except OSError:
        return "a peer that has gone"
    return str(address[0]) if isinstance(address, tuple) else "this host"


def is_beyond_host(sock: socket.socket, peer_host: str) -> bool:
    """Return whether a connection leaves this host: not if both ends have the same address, or loopback addresses.

    Args:
        sock: the connection, or an attempt to connect.
        peer_host: numeric address of the peer.
    """
    own = str(sock.getsockname()[0])
    return own != peer_host and not (is_loopback(own) and is_loopback(peer_host))
