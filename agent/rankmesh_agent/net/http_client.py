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
from rankmesh_agent.net.readiness import is_ready
from rankmesh_agent.net.tls import DEFAULT_PORTS, check_scheme, require_at
from rankmesh_agent.net.tls_socket import NoTlsError, OtherTokenError, TlsSocket
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import remedy
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES

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
    """A response.

    Attributes:
        status: the HTTP status.
        body: the body.
        headers: the header fields, by name in the server's spelling.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = {}

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: the body is not JSON.
        """
        return json_text.loads(self.body)


class UnauthenticatedServerError(AuthenticationError, NoResponseError):
    """The server has no TLS, or no certificate that is accepted."""


class HttpClient:
    """Client of any number of servers, which keeps the latest connection open. One thread at a time may use it.

    Args:
        token: the credential, which is sent where ``tls.secured`` permits it; empty for none.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self._netloc = ""
        self._aborted = False
        self._connection: _Connection | None = None

    def request(
        self,
        method: str,
        url: str,
        document: Any = None,
        *,
        timeout: float,
        compressed: bool = False,
        content: bytes = b"",
        connect_seconds: float = math.inf,
        limit: int = MAX_BODY_BYTES,
    ) -> HttpResponse:
        """Send a request and return the response, whatever its status, without proxies and without redirects.

        Args:
            method: ``"GET"``, ``"POST"``.
            url: the URL.
            document: JSON document of the request's body; None for no body.
            timeout: maximum seconds of each connect, send, and receive.
            compressed: whether the server may compress the response's body.
            content: the request's body, if it is no document.
            connect_seconds: a lower maximum for connects.
            limit: maximum bytes of the response's body.

        Raises:
            NoResponseError: no complete response has arrived: ConnectError if there is no connection,
                ResponseTooLargeError if its body exceeds the limit.
            UnauthenticatedServerError: the server does not have what it needs for TLS.
            DescriptorLimitError: there is no free descriptor for a connection.
            AuthenticationError: the server's certificate is not accepted.
            ValueError: the URL is invalid, or without TLS where RANKMESH_TLS=require.
        """
        split = urlsplit(url)
        if not split.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
        check_scheme(split.scheme, url)
        netloc = split.netloc.rpartition("@")[2]
        server = _Server(
            split.scheme, split.hostname, split.port, netloc, timeout, min(timeout, connect_seconds), limit
        )
        target = f"{split.path}?{split.query}" if split.query else split.path
        body, headers = content, dict[str, str | bytes]()
        if document is not None:
            body, headers["content-type"] = json_text.encode(document), "application/json"
        if compressed:
            headers["accept-encoding"] = "gzip"
        if self._token:
            headers["authorization"] = b"Bearer " + self._token.encode()
        try:
            found = self._exchange(server, method, target, headers, body)
            if found.status == HTTPStatus.FORBIDDEN and self._must_use_tls(found):
                found = self._exchange(server, method, target, headers, body)
            return found
        except OtherTokenError:
            self.close()
            return HttpResponse(HTTPStatus.UNAUTHORIZED, _refusal(self._token))
        except NoTlsError as error:
            self.close()
            text = f"{url} is not the server that it should be: {error}"
            raise UnauthenticatedServerError(text, address=url) from None
        except (OSError, zlib.error, http.client.HTTPException, UnicodeError) as error:
            kind = NoResponseError if self._connection is None or self._connection.connected else ConnectError
            self.close()
            raise_if_exhausted(error, f"cannot connect to {url}")
            raise kind(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()  # the next request must not receive this one's response
            raise

    def _exchange(
        self, server: _Server, method: str, target: str, headers: dict[str, str | bytes], body: bytes
    ) -> HttpResponse:
        """Send a request, and return the response."""
        connection = self._connection_to(server)
        if connection.sock is None:
            connection.connect()
        if self._aborted:  # while it connected
            raise ConnectionAbortedError("the request was aborted")
        connection.request(method, target, body or None, {"host": server.netloc, **headers})
        response = connection.getresponse()
        content = response.read(server.limit + 1)
        if len(content) > server.limit:
            raise ResponseTooLargeError(f"the response has more than {server.limit} bytes")
        if response.length:  # read() with a limit does not raise this itself
            raise http.client.IncompleteRead(content, response.length)
        if response.status == HTTPStatus.BAD_REQUEST and b"HTTPS" in content[:1000]:  # RankMesh's, nginx's or Go's
            raise UnauthenticatedServerError(f"the server at {server.netloc} refuses the request: {_NEEDS_TLS}")
        if response.getheader("Content-Encoding") == "gzip":
            content = zlib.decompressobj(wbits=_GZIP).decompress(content, server.limit)
        return HttpResponse(response.status, content, dict(response.getheaders()))

    def _must_use_tls(self, refused: HttpResponse) -> bool:
        """Return whether the next connection to the server uses TLS, as it refuses the token without.

        That is so where a process of this host passes connections on: of a container's published port, say.
        """
        peer = None if self._connection is None else self._connection.plain_peer
        if peer is None or b'"cleartext-token"' not in refused.body:
            return False
        require_at(peer)
        self.close()
        return True

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """End the request in progress, and all further ones, with an error. From any thread."""
        self._aborted = True
        connection = self._connection
        with contextlib.suppress(OSError, AttributeError):  # there is none, or no more
            connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def _connection_to(self, server: _Server) -> _Connection:
        """Return a connection to a server: the kept one if it is still open, else a new one."""
        netloc = f"{server.scheme}://{server.host}:{server.port}"
        connection = self._connection
        if connection is None or connection.sock is None or netloc != self._netloc or _readable(connection.sock):
            self.close()
            connection = self._connection = _Connection(server, self._token)
            self._netloc = netloc
        else:
            connection.sock.settimeout(server.timeout)
        return connection


class _Server(NamedTuple):
    """A server, as its URL has it, and the limits of a request to it."""

    scheme: str
    host: str
    port: int | None
    netloc: str
    timeout: float
    connect_timeout: float
    limit: int


def _refusal(credential: str) -> bytes:
    """Return the body of a response 401, as the server has another token and so ends the handshake of TLS."""
    return json_text.encode(
        {
            "type": "about:blank",
            "title": HTTPStatus.UNAUTHORIZED.phrase,
            "status": int(HTTPStatus.UNAUTHORIZED),
            "detail": f"its token is another one than that given: {remedy(credential)}",
            "code": "unauthenticated",
        }
    )


class _Connection(http.client.HTTPConnection):
    """Connection to a server, with TLS if it needs that.

    Attributes:
        plain_peer: the server's socket address, if it is connected without TLS.
        connected: whether it has ever been connected.
    """

    def __init__(self, server: _Server, token: str) -> None:
        self.default_port = DEFAULT_PORTS[server.scheme]  # the Host field leaves it out
        super().__init__(server.host, server.port, timeout=server.timeout)
        self._server, self._token = server, token
        self.plain_peer: tuple[Any, ...] | None = None
        self.connected = False

    def connect(self) -> None:
        server = self._server
        self.sock = connect(server.scheme, self.host, self.port, server.connect_timeout, self._token)
        if isinstance(self.sock, TlsSocket):
            self.sock.handshake()
        else:
            self.plain_peer = self.sock.getpeername()
        self.sock.settimeout(server.timeout)
        self.connected = True
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _readable(sock: Any) -> bool:
    """Return whether an idle connection is readable, since the server has closed it."""
    return is_ready(sock, 0.0)
