"""JSON lines over a local socket: how the benchmark gives its ranks orders, whatever launched them."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of a connection between the benchmark and a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = connection.makefile("rwb")

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Connect to the socket that listens at a path."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: Message) -> None:
        """Send one message."""
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, None when the other end is gone.

        Raises:
            TimeoutError: nothing came for ``timeout`` seconds (None: wait for ever). The channel is of no use then.
        """
        self._socket.settimeout(timeout)
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        """Close this end, also when the other one went while something was on its way there."""
        with contextlib.suppress(ConnectionError):
            self._lines.close()
        self._socket.close()
