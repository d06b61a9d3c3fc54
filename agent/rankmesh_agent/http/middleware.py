"""What every HTTP request has to pass before an application sees it: ASGI middleware without a framework.

Three checks, on every method and path:

* *Host* must be an address or a name we are known by, and *Origin*, which browsers send, must be the same place. That
  keeps a web page the user happens to visit from talking to a service on the user's machine (DNS rebinding, CSRF).
* Everything but health, and what an application opens besides, wants ``Authorization: Bearer <token>`` when the job
  has a token.
* A body may not be larger than the limit: counted while it arrives, whatever Content-Length says.

It also holds the one way an error becomes an ``application/problem+json`` body (RFC 9457).
"""

from __future__ import annotations

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
"""Answered without a token, so that load balancers and people can ask; they tell no secrets."""

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


def bug(whose: str, method: str, path: str, error: Exception) -> Problem:
    """Return the problem document of a failure that nobody thought of; ``whose`` names the service."""
    detail = f"{method} {path} failed with {type(error).__name__}; the {whose}'s log says where"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)


class _BodyTooLargeError(BaseException):  # not an Exception: frameworks answer those themselves
    pass


class SecurityMiddleware:
    """ASGI middleware with the three checks.

    Args:
        app: the application behind it.
        token: the job's token; empty means that none is asked for.
        names: host names (besides addresses and localhost) under which we may be asked.
        max_body: largest request body in bytes.
        large_body: largest one where ``is_large`` says so.
        is_large: says of a request, by its method and path, whether it may have a large body.
        open_paths: paths besides health that are answered without a token.
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
        """Check the request, then pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        limit = self._large_body if self._is_large(scope["method"], scope["path"]) else self._max_body
        refusal = self._check(scope["path"], headers, limit)
        if refusal is not None:
            await _send_problem(refusal, send)
            return
        received = 0
        started = False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _BodyTooLargeError
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _BodyTooLargeError:
            if not started:
                await _send_problem(_too_large(limit), send)

    def _check(self, path: str, headers: dict[bytes, bytes], limit: int) -> Problem | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known_host(host):
            return problem(
                421, "unknown-host", f"this service is not known as {host!r}; use its address or localhost in the URL"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (
            f"http://{host.lower()}",
            f"https://{host.lower()}",
        ):
            return problem(403, "foreign-origin", "requests from another site's pages are refused")
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
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _too_large(limit: int) -> Problem:
    return problem(413, "body-too-large", f"the request body is over the limit of {limit} bytes")


async def _send_problem(refusal: Problem, send: Send) -> None:
    body = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="rankmesh"'))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
