"""HTTP Upgrade (RFC 9110, section 7.8): a client switches to another protocol on an HTTP port. Pure: no I/O.

An agent thus needs one port, and a server that does not know the protocol responds in HTTP.
"""

from __future__ import annotations

from http import HTTPStatus

from rankmesh_agent.wire.errors import ProtocolError

MAX_HEAD_BYTES = 8192
"""Maximum bytes of an HTTP head before the switch."""
NEEDS_TLS = "it takes connections with TLS alone: set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY here, too"
_SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\n"
_END = b"\r\n\r\n"


class Upgrade:
    """One protocol.

    Args:
        path: path of the upgrade request.
        protocol: name of the protocol.
    """

    def __init__(self, path: bytes, protocol: bytes) -> None:
        self._request_line = b"GET " + path + b" HTTP/1.1\r\n"
        self._protocol = protocol
        self._field = b"\r\nupgrade: " + protocol + b"\r\n"

    def request(self, host: str) -> bytes:
        """Return the HTTP request for the protocol.

        Args:
            host: host and port in the format of URLs.
        """
        fields = b"Host: " + host.encode("ascii", "replace") + b"\r\nConnection: Upgrade"
        return self._request_line + fields + self._field + b"\r\n"

    def response(self, field: bytes = b"") -> bytes:
        """Return the response to the request, with an optional further header field."""
        more = b"\r\n" + field if field else b""
        return _SWITCHING + b"Connection: Upgrade\r\nUpgrade: " + self._protocol + more + _END

    def is_requested(self, head: bytes) -> bool | None:
        """Return whether the first bytes of a connection request the protocol; None if more bytes are needed."""
        if not head.startswith(self._request_line):
            return None if self._request_line.startswith(head) else False
        if _END not in head:
            return None if len(head) < MAX_HEAD_BYTES else False
        return head.endswith(_END) and self._field in head.lower()


def needs_tls(status: int, body: bytes) -> bool:
    """Return whether a response is that of a port for TLS to a request without: RankMesh's, nginx's or Go's."""
    return status == HTTPStatus.BAD_REQUEST and b"HTTPS" in body[:1000]


def is_complete(head: bytes) -> bool:
    """Return whether the response to an upgrade request is complete.

    Raises:
        ProtocolError: the server has not switched: it does not know the protocol.
    """
    if not head.startswith(_SWITCHING[:13]) or len(head) >= MAX_HEAD_BYTES:
        if _SWITCHING[:13].startswith(head):
            return False
        if head[9:12].isdigit() and needs_tls(int(head[9:12]), head):
            raise ProtocolError(NEEDS_TLS)
        raise ProtocolError("the server speaks HTTP, but does not know the requested protocol")
    return _END in head
