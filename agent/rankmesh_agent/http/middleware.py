"""ASGI middleware, without a framework, that checks every request before the application gets it.

Three checks, on every method and path:

* *Host* must be an address or a name of this service, and *Origin*, which browsers send, must be the same. So a web
  page that the user visits cannot send requests to a service on the user's machine (DNS rebinding, CSRF).
* If the job has a token, every path but health and the application's open ones needs ``Authorization: Bearer <token>``.
* The body has a size limit: bytes are counted while they arrive, whatever Content-Length is.

It also holds the one way an error becomes an ``application/problem+json`` body (RFC 9457).
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES, Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Paths without a token, for load balancers and people; their responses hold no secrets."""

_MOST_DIGITS = 18
PROBLEM_TYPE = "application/problem+json"
"""The media type of a problem document."""


def problem(status: int, code: str, detail: str, **extensions: Any) -> Problem:
    """Return a problem document for ``status``."""
    return Problem("about:blank", HTTPStatus(status).phrase, status, detail, code, **extensions)


def problem_of(error: DistError) -> Problem:
    """Return the problem document of an error: its class says code and status, its data becomes extension members."""
    more: dict[str, Any] = error.details()
    if error.ranks and isinstance(error, TimeoutError):
        more["missing_ranks"] = list(error.ranks)
    if error.first_failure is not None:
        more["first_failure"] = error.first_failure
    if error.retryable:
        more["retryable"] = True
    return problem(error.status, error.code, error.message, **more)


def bug(service: str, method: str, path: str, error: Exception) -> Problem:
    """Return the problem document of an unexpected exception in a service."""
    detail = f"{method} {path} failed with {type(error).__name__}; the {service}'s log says where"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)


class _BodyTooLargeError(BaseException):  # not an Exception: frameworks handle those themselves
    pass


class SecurityMiddleware:
    """ASGI middleware with these three checks.

    Args:
        app: the application behind it.
        token: the job's token; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
        max_body: limit of a request's body, in bytes.
        large_body: the limit of requests for which ``is_large`` is true.
        is_large: predicate of a request's method and path.
        open_paths: paths besides health that need no token.
    """

    def __init__(
        self,
        app: Application,
        token: str = "",
        names: Iterable[str] = (),
        max_body: int = MAX_BODY_BYTES,
        large_body: int = 0,
        is_large: Callable[[str, str], bool] = lambda method, path: False,
        open_paths: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._names = frozenset(name.lower() for name in names) | {"localhost"}
        self._max_body = max_body
        self._large_body = large_body
        self._is_large = is_large
        self._open = OPEN_PATHS.union(open_paths)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, then forward it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        limit = self._large_body if self._is_large(scope["method"], scope["path"]) else self._max_body
        rejection = self._check(scope["path"], headers, limit)
        if rejection is not None:
            await _send_problem(rejection, send)
            return
        received = 0
        started = False

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _BodyTooLargeError
            return message

        async def forward(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive_counted, forward)
        except _BodyTooLargeError:
            if not started:
                await _send_problem(_too_large(limit), send)

    def _check(self, path: str, headers: dict[bytes, bytes], limit: int) -> Problem | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known_host(host):
            return problem(
                421, "unknown-host", f"this service has no host name {host!r}; use its address or localhost in the URL"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (
            f"http://{host.lower()}",
            f"https://{host.lower()}",
        ):
            return problem(403, "foreign-origin", "requests from other sites' pages are rejected")
        if path not in self._open and self._expected:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                return problem(401, "unauthenticated", "send the job's token: Authorization: Bearer $RANKMESH_TOKEN")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) > limit:
            return _too_large(limit)
        return None

    def _is_known_host(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        return name in self._names or _is_address(name)


@functools.lru_cache
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _too_large(limit: int) -> Problem:
    return problem(413, "body-too-large", f"the request body is over the limit of {limit} bytes")


async def _send_problem(document: Problem, send: Send) -> None:
    body = json.dumps(document.body()).encode()
    headers = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    if document.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="rankmesh"'))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": document.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
