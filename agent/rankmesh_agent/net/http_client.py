"""Small questions in JSON over one HTTP connection, with what Python brings along.

Every rank asks its gateway once a second. httpx, with all that it imports, would be a quarter of what a rank's start
takes, and nothing that it can do beyond this is needed here.
"""

from __future__ import annotations

import http.client
import json
import select
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rankmesh_agent.wire.schemas import MAX_BODY_BYTES


class NoResponseError(Exception):
    """Nobody is there, or the connection broke before the answer was here."""


class HttpResponse(NamedTuple):
    """What came back.

    Attributes:
        status: the HTTP status.
        body: the bytes behind it.
        headers: the header fields, by name as the server wrote it.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = {}

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: it is something else.
        """
        return json.loads(self.body)


class HttpClient:
    """Asks one server after the other; the connection to the latest is kept. One thread at a time may use it.

    Args:
        token: sent with each request; empty for none.
    """

    def __init__(self, token: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._place = ""
        self._connection: http.client.HTTPConnection | None = None

    def request(self, method: str, url: str, document: Any = None, *, timeout: float) -> HttpResponse:
        """Send a request and return the answer, whatever its status. Proxies are not asked, redirects not followed.

        Args:
            method: ``"GET"``, ``"POST"``.
            url: whom to ask.
            document: goes along as JSON unless it is None.
            timeout: seconds that connecting, sending, and waiting for the next piece of the answer may each take.

        Raises:
            NoResponseError: there was none.
            ValueError: it is no URL.
        """
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
        body, headers = None, self._headers
        if document is not None:
            body, headers = json.dumps(document).encode(), {**headers, "Content-Type": "application/json"}
        try:
            connection = self._connected(split.hostname, split.port or 80, timeout)
            connection.request(method, f"{split.path}?{split.query}" if split.query else split.path, body, headers)
            response = connection.getresponse()
            answer = HttpResponse(response.status, response.read(MAX_BODY_BYTES), dict(response.getheaders()))
            if response.length:  # read() with a limit does not mind
                raise http.client.IncompleteRead(answer.body, response.length)
            if not response.isclosed():  # it ends where the connection does, or is more than we want to have
                self.close()
            return answer
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            self.close()
            raise NoResponseError(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()  # an answer may be under way that the next question would be given
            raise

    def close(self) -> None:
        """Close the connection; another question opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self, host: str, port: int, timeout: float) -> http.client.HTTPConnection:
        """Return a connection to a server: the one that is there, if it still is."""
        place = f"{host}:{port}"
        connection = self._connection
        if connection is None or connection.sock is None or place != self._place or _readable(connection.sock):
            self.close()
            connection = self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
            self._place = place
        else:
            connection.sock.settimeout(timeout)
        return connection


def _readable(sock: Any) -> bool:
    """Whether an idle connection has something to say: that the other side has closed it."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
