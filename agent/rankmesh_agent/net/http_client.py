"""HTTP client for small JSON requests over one connection, on the standard library alone.

Every rank sends a request to its gateway once a second. The import of httpx would take a quarter of a rank's start, and
no feature beyond this is needed here.
"""

from __future__ import annotations

import http.client
import json
import select
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.fork import detach
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
        return json.loads(self.body)


class HttpClient:
    """Client of any number of servers, which keeps the latest connection open. One thread at a time may use it.

    Args:
        token: bearer token of each request; empty for none.
    """

    def __init__(self, token: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._netloc = ""
        self._connection: http.client.HTTPConnection | None = None

    def request(
        self, method: str, url: str, document: Any = None, *, timeout: float, compressed: bool = False
    ) -> HttpResponse:
        """Send a request and return the response, whatever its status, without proxies and without redirects.

        Args:
            method: ``"GET"``, ``"POST"``.
            url: the URL, http only.
            document: JSON document of the request's body; None for no body.
            timeout: maximum seconds of each connect, send, and receive.
            compressed: whether the server may compress the response's body.

        Raises:
            NoResponseError: no complete response has arrived.
            DescriptorLimitError: there is no free descriptor for a connection.
            ValueError: the URL is invalid.
        """
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
        body, headers = None, self._headers
        if document is not None:
            body, headers = json.dumps(document).encode(), {**headers, "Content-Type": "application/json"}
        if compressed:
            headers = {**headers, "Accept-Encoding": "gzip"}
        try:
            connection = self._connection_to(split.hostname, split.port or 80, timeout)
            connection.request(method, f"{split.path}?{split.query}" if split.query else split.path, body, headers)
            response = connection.getresponse()
            content = response.read(MAX_BODY_BYTES)
            if response.length:  # read() with a limit does not raise this itself
                raise http.client.IncompleteRead(content, response.length)
            if not response.isclosed():  # the body has no length, or exceeds the limit
                self.close()
            if response.getheader("Content-Encoding") == "gzip":
                content = zlib.decompressobj(wbits=_GZIP).decompress(content, MAX_BODY_BYTES)
            return HttpResponse(response.status, content, dict(response.getheaders()))
        except (OSError, zlib.error, http.client.HTTPException, UnicodeError) as error:
            self.close()
            raise_if_exhausted(error, f"cannot connect to {url}")
            raise NoResponseError(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()  # the next request must not receive this one's response
            raise

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

    def _connection_to(self, host: str, port: int, timeout: float) -> http.client.HTTPConnection:
        """Return a connection to a server: the kept one if it is still open, else a new one."""
        netloc = f"{host}:{port}"
        connection = self._connection
        if connection is None or connection.sock is None or netloc != self._netloc or _readable(connection.sock):
            self.close()
            connection = self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
            self._netloc = netloc
        else:
            connection.sock.settimeout(timeout)
        return connection


def _readable(sock: Any) -> bool:
    """Return whether an idle connection is readable, since the server has closed it."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
