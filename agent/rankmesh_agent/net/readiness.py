"""Wait for one socket, on any system."""

from __future__ import annotations

import select
import socket


def is_ready(sock: socket.socket, seconds: float, *, writing: bool = False) -> bool:
    """Return whether a socket is readable, or writable, within a time."""
    if not hasattr(select, "poll"):  # Windows, whose select has no limit of the descriptor's number
        return any(select.select([] if writing else [sock], [sock] if writing else [], [], seconds))
    poll = select.poll()
    poll.register(sock, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(1000 * seconds))
