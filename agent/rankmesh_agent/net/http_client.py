"""HTTP client for small JSON requests over one connection, on the standard library alone.

Every rank sends a request to its gateway once a second. The import of httpx would take a quarter of a rank's start, and
no feature beyond this is needed here.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.sockets import is_ready
from rankmesh_agent.net.tls import require_at
from rankmesh_agent.net.tls_socket import NoTlsError, OtherTokenError, TlsSocket
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import remedy
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES, Problem

_NEEDS_TLS = (
    "it takes connections with TLS alone: set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY here, too"
)
_GZIP = 16 + zlib.MAX_WBITS


class NoResponseError(Exception):
    """The server is unreachable, or the connection ended before the response was complete."""


class ConnectError(NoResponseError):
    """No connection could be made."""


class ResponseTooLargeError(NoResponseError):
    """The response's body exceeds the limit."""


class HttpResponse(NamedTuple):
    """A response: its status, its body, and its header fields by name in the server's spelling."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}

    def json(self) -> Any:
        """Return the body as JSON; raise ValueError if it is not."""
        return json_text.loads(self.body)


class UnauthenticatedServerError(AuthenticationError, NoResponseError):
    """The server has no TLS, or no certificate that is accepted."""


class HttpClient:
    """Client of any number of servers, which keeps the latest connection open. One thread at a time may use it.

    The token is sent where ``tls.secured`` permits it.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self._server = "", ""
        """Scheme, and host and port, of the connection."""
        self._aborted = self._is_connected = False
        self._connection: http.client.HTTPConnection | None = None
        self._plain_peer: Any = None
        """The server's socket address, if the connection has no TLS."""

    def request(
        self,
        method: str,
        url: str,
        document: Any = None,
        *,
        timeout: float,
        content: bytes = b"",
        connect_seconds: float = math.inf,
        limit: int = MAX_BODY_BYTES,
    ) -> HttpResponse:
        """Send a request and return the response, whatever its status, without proxies and without redirects.

        Args:
            document: JSON document of the request's body; None for no body.
            timeout: maximum seconds of each connect, send, and receive.
            connect_seconds: a lower maximum for connects.

        Raises:
            NoResponseError: no complete response has arrived: ConnectError if there is no connection,
                ResponseTooLargeError if its body exceeds the limit.
            UnauthenticatedServerError: the server does not have what it needs for TLS.
            DescriptorLimitError: there is no free descriptor for a connection.
            AuthenticationError: the server's certificate is not accepted.
            ValueError: the URL is invalid, or without TLS where RANKMESH_TLS=require.
        """
        split = urlsplit(url)
        headers: dict[str, str | bytes] = {"host": split.netloc.rpartition("@")[2], "accept-encoding": "gzip"}
        body = content
        if document is not None:
            body, headers["content-type"] = json_text.encode(document), "application/json"
        if self._token:
            headers["authorization"] = b"Bearer " + self._token.encode()

        def exchange() -> HttpResponse:
            connection = self._connected(url, min(timeout, connect_seconds))
            connection.sock.settimeout(timeout)
            target = f"{split.path}?{split.query}" if split.query else split.path
            connection.request(method, target, body or None, headers)
            return self._receive(connection, limit)

        try:
            found = exchange()
            if found.status == HTTPStatus.FORBIDDEN and b'"cleartext-token"' in found.body and self._plain_peer:
                require_at(self._plain_peer)  # a process here passes connections on: of a container's port, say
                self.close()
                found = exchange()
            return found
        except OtherTokenError:
            self.close()
            return _refusal(self._token)
        except NoTlsError as error:
            self.close()
            text = f"{url} is not the server that it should be: {error}"
            raise UnauthenticatedServerError(text, address=url) from None
        except (OSError, zlib.error, http.client.HTTPException, UnicodeError) as error:
            kind = NoResponseError if self._is_connected else ConnectError
            self.close()
            raise_if_exhausted(error, f"cannot connect to {url}")
            raise kind(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()  # the next request must not receive this one's response
            raise

    def _connected(self, url: str, seconds: float) -> http.client.HTTPConnection:
        """Return a connection to a server: the kept one if it is still open, else a new one."""
        split = urlsplit(url)
        connection = self._connection
        if connection and connection.sock and self._server == split[:2] and not is_ready(connection.sock, 0.0):
            return connection
        self.close()
        sock = connect(url, seconds, self._token)
        self._connection = connection = http.client.HTTPConnection(split.hostname or "", split.port or 0)
        connection.sock, connection.auto_open, self._server = sock, 0, split[:2]
        self._plain_peer = None if isinstance(sock, TlsSocket) else sock.getpeername()
        if isinstance(sock, TlsSocket):
            sock.handshake()
        self._is_connected = True
        if self._aborted:  # while it connected
            raise ConnectionAbortedError("the request was aborted")
        return connection

    def _receive(self, connection: http.client.HTTPConnection, limit: int) -> HttpResponse:
        response = connection.getresponse()
        content = _limited(response.read(limit + 1), limit)
        if response.length:  # read() with a limit does not raise this itself
            raise http.client.IncompleteRead(content, response.length)
        if response.status == HTTPStatus.BAD_REQUEST and b"HTTPS" in content[:1000]:  # RankMesh's, nginx's or Go's
            raise UnauthenticatedServerError(f"the server at {self._server[1]} refuses the request: {_NEEDS_TLS}")
        if response.getheader("Content-Encoding") == "gzip":
            content = _limited(zlib.decompressobj(wbits=_GZIP).decompress(content, limit + 1), limit)
        return HttpResponse(response.status, content, dict(response.getheaders()))

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        connection, self._connection, self._is_connected = self._connection, None, False
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """End the request in progress, and all further ones, with an error. From any thread."""
        self._aborted = True
        connection = self._connection
        with contextlib.suppress(OSError, AttributeError):  # there is none, or no more
            connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


def _limited(content: bytes, limit: int) -> bytes:
    """Return the first bytes of a response's body, unless they exceed the limit."""
    if len(content) > limit:
        raise ResponseTooLargeError(f"the response has more than {limit} bytes")
    return content


def _refusal(credential: str) -> HttpResponse:
    """Return a response 401, as the server has another token and so ends the handshake of TLS."""
    detail, status = f"its token is another one than that given: {remedy(credential)}", HTTPStatus.UNAUTHORIZED
    problem = Problem("about:blank", status.phrase, status, detail, AuthenticationError.code)
    return HttpResponse(status, json_text.encode(problem.body()))
