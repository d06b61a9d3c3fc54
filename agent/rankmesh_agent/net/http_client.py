"""HTTP client for small JSON requests over one connection, on the standard library alone.

Every rank sends a request to its gateway once a second. The import of httpx would take a quarter of a rank's start, and
no feature beyond this is needed here.
"""

from __future__ import annotations

import http.client
import socket
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.fork import detach
from rankmesh_agent.net.http_sessions import session_with
from rankmesh_agent.net.readiness import is_ready
from rankmesh_agent.net.tls import DEFAULT_PORTS, check_scheme, connect
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.http_auth import (
    HELLO_METHOD,
    HELLO_TARGET,
    INFO,
    MissingProofError,
    ReceivedResponse,
    exchange,
    needs_tls,
    refusal,
)
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES

_GZIP = 16 + zlib.MAX_WBITS


class NoResponseError(Exception):
    """The server is unreachable, or the connection ended before the response was complete."""


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
    """The server does not prove that it knows the token, so its response is not used."""


class HttpClient:
    """Client of any number of servers, which keeps the latest connection open. One thread at a time may use it.

    Args:
        token: the credential, which is proved by ``wire.http_auth`` and never sent; empty for none.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self._netloc = ""
        self._connection: http.client.HTTPConnection | None = None

    def request(
        self,
        method: str,
        url: str,
        document: Any = None,
        *,
        timeout: float,
        compressed: bool = False,
        content: bytes = b"",
    ) -> HttpResponse:
        """Send a request and return the response, whatever its status, without proxies and without redirects.

        Args:
            method: ``"GET"``, ``"POST"``.
            url: the URL.
            document: JSON document of the request's body; None for no body.
            timeout: maximum seconds of each connect, send, and receive.
            compressed: whether the server may compress the response's body.
            content: the request's body, if it is no document.

        Raises:
            NoResponseError: no complete response has arrived.
            UnauthenticatedServerError: the server does not prove that it knows the token.
            DescriptorLimitError: there is no free descriptor for a connection.
            AuthenticationError: the server's certificate is not accepted.
            ValueError: the URL is invalid, or without TLS where RANKMESH_TLS=require.
        """
        split = urlsplit(url)
        if not split.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
        check_scheme(split.scheme, url)
        netloc = split.netloc.rpartition("@")[2]
        server = _Server(split.scheme, split.hostname, split.port, netloc, timeout)
        target = f"{split.path}?{split.query}" if split.query else split.path
        body, headers = content, {}
        if document is not None:
            body, headers = json_text.encode(document), {"content-type": "application/json"}
        if compressed:
            headers["accept-encoding"] = "gzip"
        try:
            if not self._token:
                return _decoded(*self._exchange(server, method, target, headers, body))
            return self._request_proven(server, method, target, headers, body)
        except (OSError, zlib.error, http.client.HTTPException, UnicodeError) as error:
            self.close()
            raise_if_exhausted(error, f"cannot connect to {url}")
            raise NoResponseError(str(error) or type(error).__name__) from error
        except MissingProofError as error:
            self.close()
            if error.retryable:
                raise NoResponseError(f"it answers {error.status} without a proof") from error
            raise UnauthenticatedServerError(
                f"{url} is not the server that it should be: {error}", address=url
            ) from error
        except BaseException:
            self.close()  # the next request must not receive this one's response
            raise

    def _request_proven(
        self, server: _Server, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> HttpResponse:
        """Send a request with a proof of the token, and return the response of a server that proves it, too."""
        session = session_with(server.netloc, self._token)
        script = exchange(session, method, target, server.netloc, headers, body)
        request = next(script)
        while True:
            authorization = {"authorization": request.authorization}
            if request.own:
                found, content = self._exchange(server, method, target, headers | authorization, body)
            else:
                found, content = self._exchange(server, HELLO_METHOD, HELLO_TARGET, authorization, b"")
            challenge = found.getheader("WWW-Authenticate", "")
            try:
                request = script.send(ReceivedResponse(found.status, challenge, found.getheader(INFO, ""), content))
            except StopIteration as end:
                refused = HttpResponse(HTTPStatus.UNAUTHORIZED, refusal(self._token))
                return _decoded(found, content) if end.value else refused

    def _exchange(
        self, server: _Server, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request, and return the response's head and body as they come."""
        connection = self._connection_to(server)
        connection.request(method, target, body or None, {"host": server.netloc, **headers})
        response = connection.getresponse()
        content = response.read(MAX_BODY_BYTES)
        if response.length:  # read() with a limit does not raise this itself
            raise http.client.IncompleteRead(content, response.length)
        if needs_tls(response.status, content):
            raise MissingProofError(response.status, content)
        if not response.isclosed():  # the body has no length, or exceeds the limit
            self.close()
        return response, content

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close_in_child(self) -> None:
        """Close the connection in a forked child; the parent's stays open."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            detach([connection.sock.fileno()])

    def _connection_to(self, server: _Server) -> http.client.HTTPConnection:
        """Return a connection to a server: the kept one if it is still open, else a new one."""
        netloc = f"{server.scheme}://{server.host}:{server.port}"
        connection = self._connection
        if connection is None or connection.sock is None or netloc != self._netloc or _readable(connection.sock):
            self.close()
            connection = self._connection = _Connection(server.scheme, server.host, server.port, timeout=server.timeout)
            self._netloc = netloc
        else:
            connection.sock.settimeout(server.timeout)
        return connection


class _Server(NamedTuple):
    """A server, as its URL has it, and the time limit of a request to it."""

    scheme: str
    host: str
    port: int | None
    netloc: str
    timeout: float


def _decoded(response: http.client.HTTPResponse, content: bytes) -> HttpResponse:
    if response.getheader("Content-Encoding") == "gzip":
        content = zlib.decompressobj(wbits=_GZIP).decompress(content, MAX_BODY_BYTES)
    return HttpResponse(response.status, content, dict(response.getheaders()))


class _Connection(http.client.HTTPConnection):
    """Connection to a server, with TLS if the scheme is https."""

    def __init__(self, scheme: str, host: str, port: int | None, *, timeout: float) -> None:
        self.default_port = DEFAULT_PORTS[scheme]  # the Host field leaves it out
        super().__init__(host, port, timeout=timeout)
        self._scheme, self._seconds = scheme, timeout

    def connect(self) -> None:
        self.sock = connect(self._scheme, self.host, self.port, self._seconds)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _readable(sock: Any) -> bool:
    """Return whether an idle connection is readable, since the server has closed it."""
    return is_ready(sock, 0.0)
