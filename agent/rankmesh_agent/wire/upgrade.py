"""HTTP Upgrade (RFC 9110, section 7.8), by which a client changes to another protocol on an HTTP port. Pure.

So whoever does not know the protocol answers in HTTP, and an agent needs one port.
"""

from __future__ import annotations

from rankmesh_agent.wire.errors import ProtocolError

MAX_HEAD_BYTES = 8192
"""Largest HTTP head, before the protocol is another."""
_SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\n"
_END = b"\r\n\r\n"


class Upgrade:
    """One protocol.

    Args:
        path: where it is asked for.
        protocol: its name.
    """

    def __init__(self, path: bytes, protocol: bytes) -> None:
        self._request_line = b"GET " + path + b" HTTP/1.1\r\n"
        self._protocol = protocol
        self._wanted = b"\r\nupgrade: " + protocol + b"\r\n"

    def request(self, host: str) -> bytes:
        """Return the HTTP request that asks for the protocol.

        Args:
            host: host and port, as URLs have them.
        """
        fields = b"Host: " + host.encode("ascii", "replace") + b"\r\nConnection: Upgrade"
        return self._request_line + fields + self._wanted + b"\r\n"

    def switching(self, field: bytes = b"") -> bytes:
        """Return the answer to that, with one more header field if there is one."""
        more = b"\r\n" + field if field else b""
        return _SWITCHING + b"Connection: Upgrade\r\nUpgrade: " + self._protocol + more + _END

    def asked_for(self, head: bytes) -> bool | None:
        """Return whether the first bytes of a connection ask for the protocol; None if more are needed to tell."""
        if not head.startswith(self._request_line):
            return None if self._request_line.startswith(head) else False
        if _END not in head:
            return None if len(head) < MAX_HEAD_BYTES else False
        return head.endswith(_END) and self._wanted in head.lower()


def switched(head: bytes) -> bool:
    """Return whether the answer to a request for a protocol is all there; False if more is needed.

    Raises:
        ProtocolError: the answer is another one: whoever gave it does not know the protocol.
    """
    if not head.startswith(_SWITCHING[:13]) or len(head) >= MAX_HEAD_BYTES:
        if _SWITCHING[:13].startswith(head):
            return False
        raise ProtocolError("there is HTTP, but nobody who knows the protocol that we want to change to")
    return _END in head
