"""ASGI middleware, without a framework, that checks every request before the application gets it.

The checks, on every method and path:

* Without a token, a client must be a process of this user or of root. To others, health alone is open, without details.
* *Host* must be an address or a name of this service, and *Origin*, which browsers send, must be the same. So a web
  page that the user visits cannot send requests to a service on the user's machine (DNS rebinding, CSRF).
* If the job has a token, every path but health and the application's open ones needs a credential:
  ``Authorization: Bearer <token>``. It is accepted only from clients on this host, over TLS, or on a network that the
  operator declares private. Without it, the response of /health has no details.
* The credential's role must include the one that the path needs.
* The credential of one job, or of a lease, is restricted to it by the application's function ``confine``; without one,
  it is rejected.
* The body has limits of size, whatever Content-Length is, and of time, while the application waits for it.

It also holds the one way an error becomes an ``application/problem+json`` body (RFC 9457).
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.net.peer_credentials import warn_refused
from rankmesh_agent.net.rate_limit import AddressRateLimit, WarningInterval
from rankmesh_agent.wire.credentials import Credentials, Grant, Role
from rankmesh_agent.wire.errors import AuthenticationError, DistError, ForbiddenJobError
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES, Problem

_log = logging.getLogger("rankmesh")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Paths without a token, for load balancers and people; their responses hold no secrets."""

_HOST = re.compile(r"(?:([^\[\]:]+)|\[([^\[\]]*)\])(?::[0-9]*)?")
"""A Host header (RFC 9110, section 7.2): a name or an IPv4 address, or an IPv6 address in brackets; then the port."""
UNAUTHENTICATED_A_SECOND = 100
"""Requests without a right credential that one address may send; any more get 429. Others are not counted."""
_UNAUTHENTICATED_AT_ONCE = 1000
_MOST_DIGITS = 18
_ANOTHER_TOKEN = (
    "the token of this service is another one than that given: RANKMESH_TOKEN must be the same there and here"
)
_BEARER = b"Bearer "
BODY_SECONDS = 20.0
"""Seconds that a request's body may be late: each _MIN_BODY_BYTES_A_SECOND that come make up for one."""
_MIN_BODY_BYTES_A_SECOND = 16 << 10
PROBLEM_TYPE = "application/problem+json"


def role_table(patterns: Mapping[Role, str]) -> Callable[[str, str], Role]:
    """Return the function from a request's method and path to the role that it needs: ``run`` where no pattern matches.

    A regular expression for each other role matches method and path with a space between; GET includes HEAD.
    """
    compiled = [(role, re.compile(pattern, re.DOTALL)) for role, pattern in patterns.items()]

    def role_of(method: str, path: str) -> Role:
        request = f"{'GET' if method == 'HEAD' else method} {path}"
        return next((role for role, pattern in compiled if pattern.fullmatch(request)), Role.RUN)

    return role_of


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


def encode_problem(document: Problem) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the header fields and the body of a response with a problem document."""
    body = json.dumps(document.body()).encode()
    return [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())], body


def bug(service: str, method: str, path: str, error: Exception) -> Problem:
    """Return the problem document of an unexpected exception in a service."""
    detail = f"{method} {path} failed with {type(error).__name__}; the {service}'s log says where"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)


class _RejectedError(BaseException):  # not an Exception: frameworks handle those themselves
    def __init__(self, document: Problem) -> None:
        super().__init__(document.detail)
        self.problem = document


def reject_job(scope: Message, grant: Grant) -> None:
    """Raise ForbiddenJobError: a job's credential does not permit the request."""
    raise ForbiddenJobError(
        f"the credential given is that of job {grant.job!r}, and {scope['method']} {scope['path']} is not for "
        "one job: it needs a credential of the gateway's token"
    )


@dataclass(frozen=True)
class Policy:
    """An application's part of the checks.

    Attributes:
        limit_of: returns the limit of a request's body, in bytes, by its method and path.
        open_paths: paths besides health that need no token.
        role_of: returns the role that a request's method and path need.
        translate: returns the Authorization header for which a request's own one, or without one its cookie, stands.
        confine: restricts a request to the job of its credential, or raises why that is not possible. The scope's state
            has the credential as ``grant``.
    """

    limit_of: Callable[[str, str], int] = lambda method, path: MAX_BODY_BYTES
    open_paths: Collection[str] = ()
    role_of: Callable[[str, str], Role] = lambda method, path: Role.RUN
    translate: Callable[[bytes, Message], bytes] = lambda authorization, scope: authorization
    confine: Callable[[Message, Grant], None] = reject_job


class SecurityMiddleware:
    """ASGI middleware with these checks.

    ``refusal`` in a request's state is the error of a connection of another user's process, from its begin, as a client
    may close the connection before its request is served.

    Args:
        token: the job's token, or all its credentials; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
    """

    def __init__(
        self, app: Application, token: str | Credentials = "", names: Iterable[str] = (), policy: Policy = Policy()
    ) -> None:
        self._app = app
        self._credentials = Credentials.of(token)
        self._secured = bool(self._credentials)
        self._names = frozenset(name.lower() for name in names) | {"localhost"}
        self._policy = policy
        self._open = OPEN_PATHS.union(policy.open_paths)
        self._unauthenticated = AddressRateLimit(UNAUTHENTICATED_A_SECOND, _UNAUTHENTICATED_AT_ONCE)
        self._warning = WarningInterval()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, then forward it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._policy.limit_of(scope["method"], scope["path"])
        received, seconds, complete, started = 0, BODY_SECONDS, False, False

        async def receive_checked() -> Message:
            nonlocal received, seconds, complete
            if complete:
                return await receive()  # the client's disconnect, for which a response may wait
            began = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    message = await receive()
            except TimeoutError:
                raise _RejectedError(_too_late()) from None
            size = len(message.get("body", b""))
            received += size
            if received > limit:
                raise _RejectedError(_too_large(limit))
            waited = time.monotonic() - began
            seconds = min(BODY_SECONDS, seconds - waited + size / _MIN_BODY_BYTES_A_SECOND)
            complete = not message.get("more_body")
            return message

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope, limit)
            await self._app(scope, receive_checked, send_noted)
        except _RejectedError as error:
            if not started:
                await send_problem(error.problem, send)

    def _check(self, scope: Message, limit: int) -> None:
        """Check a request but for its body; note in its state what its client holds, and whether it gets details."""
        state = scope.setdefault("state", {})
        refusal = state.get("refusal")
        if refusal is not None and scope["path"] not in OPEN_PATHS:
            warn_refused(refusal)
            raise _RejectedError(problem_of(refusal))
        headers = dict(scope["headers"])
        if len(headers) < len(scope["headers"]):
            headers = _joined(scope["headers"])
        headers[b"authorization"] = self._policy.translate(headers.get(b"authorization", b""), scope)
        self._check_site(headers)
        held = self._bearer_grant(headers)
        in_clear = self._secured and not self._is_private(scope)
        if scope["path"] not in self._open:
            if held is None:
                self._reject_unauthenticated(scope, headers)
            else:
                needed = self._policy.role_of(scope["method"], scope["path"])
                if in_clear or held.role < needed:
                    _reject_role(held, needed, in_clear)
                state["grant"] = held
                if held.job is not None:
                    try:
                        self._policy.confine(scope, held)
                    except DistError as error:
                        raise _RejectedError(problem_of(error)) from None
        if held is None or in_clear or refusal is not None:
            state["details"] = False
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) > limit:
            raise _RejectedError(_too_large(limit))

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known_host(host):
            text = f"this service has no host name {host!r}; use its address or localhost in the URL"
            raise _RejectedError(problem(421, "unknown-host", text))
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if b"origin" in headers and origin not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise _RejectedError(problem(403, "foreign-origin", "requests from other sites' pages are rejected"))

    def _bearer_grant(self, headers: dict[bytes, bytes]) -> Grant | None:
        """Return what a request's bearer token permits; None without a token of this job, if it has one."""
        authorization = headers.get(b"authorization", b"")
        if self._secured and not authorization.startswith(_BEARER):
            return None
        return self._credentials.grant_of(authorization[len(_BEARER) :].decode(errors="replace"))

    def _is_private(self, scope: Message) -> bool:
        """Return whether no network sees a request: it comes from this host, over TLS, or the network is private."""
        client, server = scope.get("client"), scope.get("server")
        if self._credentials.private_network or scope.get("scheme") == "https":
            return True
        if client is None or not _is_address(client[0]):  # not a TCP connection
            return True
        return is_loopback(client[0].removeprefix("::ffff:")) or (server is not None and client[0] == server[0])

    def _reject_unauthenticated(self, scope: Message, headers: dict[bytes, bytes]) -> NoReturn:
        """Reject a request without a right credential, by 429 if its address has sent too many."""
        address = scope["client"][0] if scope.get("client") else ""
        detail = "send the job's token: Authorization: Bearer $RANKMESH_TOKEN"
        if b" " in headers.get(b"authorization", b"").strip():  # an empty variable gives no token
            peer = f"a client at {address}" if address else "a client"
            warn_refused(AuthenticationError(f"{peer} has another token than this service"))
            detail = _ANOTHER_TOKEN
        if not address or self._unauthenticated.allows(address):
            raise _RejectedError(problem(401, "unauthenticated", detail))
        if self._warning.is_due():
            _log.warning(
                "%s sends more than %d requests a second without a right credential, which get 429",
                address,
                UNAUTHENTICATED_A_SECOND,
            )
        text = f"{address} has sent too many requests without the job's token: wait, or send it"
        raise _RejectedError(problem(429, "too-many-attempts", text))

    def _is_known_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return _is_address(host)
        name, address = match.groups()
        return name in self._names or _is_address(name or address)


def _joined(fields: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return header fields by name, with the values of all lines (RFC 9110, section 5.3), as any may be used."""
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


@functools.lru_cache
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _too_large(limit: int) -> Problem:
    return problem(413, "body-too-large", f"the request body is over the limit of {limit} bytes")


def _too_late() -> Problem:
    text = (
        f"the request's body has not come: send it without pauses of {BODY_SECONDS:g} s, and at "
        f"{_MIN_BODY_BYTES_A_SECOND >> 10} KiB a second or more"
    )
    return problem(408, "body-timeout", text, retryable=True)


def _reject_role(held: Grant, needed: Role, in_clear: bool) -> NoReturn:
    if in_clear:
        text = (
            "a bearer token is accepted from this host (127.0.0.1, or through 'ssh -L'), over https ('rankmesh token "
            "--ca' prints the authority for 'curl --cacert'), or from a network that RANKMESH_PRIVATE_NETWORK=1 "
            "declares private at the server; the 'rankmesh' command works from everywhere, as it uses TLS itself"
        )
        raise _RejectedError(problem(403, "cleartext-token", text))
    remedy = " ('rankmesh token --job JOB --lease ID' prints it)" if needed is Role.LEASE else ""
    text = (
        f"this needs a credential of the role {needed.name.lower()!r}{remedy}; the one given has the role "
        f"{held.role.name.lower()!r}"
    )
    raise _RejectedError(problem(403, "forbidden-role", text))


async def send_problem(document: Problem, send: Send) -> None:
    """Respond to a request with a problem document, and end the connection: its body may not have been read."""
    headers, body = encode_problem(document)
    if document.status == 429:
        headers.append((b"retry-after", b"1"))
    if document.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="rankmesh"'))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": document.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
