"""ASGI middleware, without a framework, that checks every request before the application gets it.

Four checks, on every method and path:

* *Host* must be an address or a name of this service, and *Origin*, which browsers send, must be the same. So a web
  page that the user visits cannot send requests to a service on the user's machine (DNS rebinding, CSRF).
* If the job has a token, every path but health and the application's open ones needs a proof of a credential
  (``wire.http_auth``), or the credential itself, for ``curl`` and browsers: ``Authorization: Bearer <token>``. This is
  accepted only from clients on this host, over TLS, or on a network that the operator declares private.
  Without either, the response of /health has no details.
* The credential's role must include the one that the path needs.
* The credential of one job, or of a lease, is restricted to it by the application's function ``confine``; without one,
  it is rejected.
* The body has a size limit: bytes are counted while they arrive, whatever Content-Length is.

It also holds the one way an error becomes an ``application/problem+json`` body (RFC 9457).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from rankmesh_agent.config.addresses import is_loopback
from rankmesh_agent.net.peer_credentials import warn_refused
from rankmesh_agent.net.rate_limit import AddressRateLimit, WarningInterval
from rankmesh_agent.wire.credentials import Credentials, Grant, Role, job_of, lease_of
from rankmesh_agent.wire.errors import AuthenticationError, DistError, ForbiddenJobError
from rankmesh_agent.wire.http_auth import (
    COVERED,
    INFO,
    SCHEME,
    STREAM,
    UNKNOWN_KEY,
    AuthenticatedClient,
    Authenticator,
    digest,
)
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
_PROVEN = tuple((name, name.encode()) for name in ("host", *COVERED))
_INFO = INFO.lower().encode()
_BEARER = b"Bearer "
PROBLEM_TYPE = "application/problem+json"
"""The media type of a problem document."""


def role_table(patterns: Mapping[Role, str]) -> Callable[[str, str], Role]:
    """Return the function from a request's method and path to the role that it needs: ``run`` where no pattern matches.

    Args:
        patterns: a regular expression for each other role, of method and path with a space between; GET includes HEAD.
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


class _BodyRejectedError(BaseException):  # not an Exception: frameworks handle those themselves
    def __init__(self, document: Problem) -> None:
        super().__init__(document.detail)
        self.problem = document


def reject_job(scope: Message, grant: Grant) -> None:
    """Reject a request of a job's credential.

    Raises:
        ForbiddenJobError: always.
    """
    raise ForbiddenJobError(
        f"the credential given is that of job {grant.job!r}, and {scope['method']} {scope['path']} is not for "
        "one job: it needs a credential of the gateway's token"
    )


class SecurityMiddleware:
    """ASGI middleware with these checks.

    Args:
        app: the application behind it.
        token: the job's token, or all its credentials; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
        max_body: limit of a request's body, in bytes.
        large_body: the limit of requests for which ``is_large`` is true.
        is_large: predicate of a request's method and path.
        open_paths: paths besides health that need no token.
        role_of: returns the role that a request's method and path need.
        translate: returns the Authorization header for which a request's own one stands, such as that of a session.
        confine: restricts a request to the job of its credential, or raises why that is not possible. The scope's state
            has the credential as ``grant``.
    """

    def __init__(
        self,
        app: Application,
        token: str | Credentials = "",
        names: Iterable[str] = (),
        max_body: int = MAX_BODY_BYTES,
        large_body: int = 0,
        is_large: Callable[[str, str], bool] = lambda method, path: False,
        open_paths: Iterable[str] = (),
        role_of: Callable[[str, str], Role] = lambda method, path: Role.RUN,
        translate: Callable[[bytes, Message], bytes] = lambda authorization, scope: authorization,
        confine: Callable[[Message, Grant], None] = reject_job,
    ) -> None:
        self._app = app
        self._credentials = credentials = Credentials.of(token)
        self._bearers = [(grant, text.encode()) for grant, text in credentials.sufficient(Role.READ)]
        self._authenticator = Authenticator(credentials) if credentials else None
        self._names = frozenset(name.lower() for name in names) | {"localhost"}
        self._max_body = max_body
        self._large_body = large_body
        self._is_large = is_large
        self._open = OPEN_PATHS.union(open_paths)
        self._unauthenticated = AddressRateLimit(UNAUTHENTICATED_A_SECOND, _UNAUTHENTICATED_AT_ONCE)
        self._warning = WarningInterval()
        self._role_of = role_of
        self._translate = translate
        self._confine = confine
        self._private_network = credentials.private_network

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, then forward it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _joined(scope["headers"])
        if b"authorization" in headers:
            headers[b"authorization"] = self._translate(headers[b"authorization"], scope)
        caller = self._caller(scope, headers)
        if isinstance(caller, str):
            has_body = b"content-length" in headers or b"transfer-encoding" in headers
            refusal = _unauthenticated(_ANOTHER_TOKEN if caller == UNKNOWN_KEY else "the proof is not of this request")
            if caller == UNKNOWN_KEY:
                _warn_of_another_token(scope)
                if scope.get("client") is not None:
                    refusal = self._limit_unauthenticated(scope["client"][0]) or refusal
            await send_problem(refusal, send, challenge=caller, close=has_body)
            return
        response = _Response(caller, send)
        limit = self._large_body if self._is_large(scope["method"], scope["path"]) else self._max_body
        held = self._bearer_grant(headers) if caller is None else caller.grant
        in_clear = caller is None and self._authenticator is not None and not self._is_private(scope)
        rejection = self._check(scope, headers, limit, held, in_clear)
        if rejection is not None:
            if rejection.status == 401 and scope.get("client") is not None:
                rejection = self._limit_unauthenticated(scope["client"][0]) or rejection
            await send_problem(rejection, response.send)
            return
        if held is None or in_clear:
            scope.setdefault("state", {})["details"] = False
        received = 0
        hashed = None if caller is None else hashlib.sha256()

        async def receive_checked() -> Message:
            nonlocal received
            message = await receive()
            body = message.get("body", b"")
            received += len(body)
            if received > limit:
                raise _BodyRejectedError(_too_large(limit))
            if caller is not None and hashed is not None and message["type"] == "http.request":
                hashed.update(body)
                if not message.get("more_body") and hashed.hexdigest() != caller.content:
                    raise _BodyRejectedError(_unauthenticated("the body is not the one that the client has signed"))
            return message

        try:
            await self._app(scope, receive_checked, response.send)
        except _BodyRejectedError as error:
            if not response.started:
                await send_problem(error.problem, response.send)

    def _caller(self, scope: Message, headers: dict[bytes, bytes]) -> AuthenticatedClient | str | None:
        """Return the client that proves a credential, the challenge for one that does not, None without the scheme."""
        if self._authenticator is None:
            return None
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if not authorization.startswith(SCHEME):
            return None
        target = scope.get("raw_path") or scope["path"].encode()
        if scope.get("query_string"):
            target += b"?" + scope["query_string"]
        # A field that is there, but empty, is not one that the client has left out.
        fields = {
            name: (value or b" ").decode("latin-1")
            for name, field in _PROVEN
            if (value := headers.get(field)) is not None
        }
        return self._authenticator.authenticate(
            authorization, scope["method"], target.decode("latin-1"), fields.get("host", ""), fields
        )

    def _bearer_grant(self, headers: dict[bytes, bytes]) -> Grant | None:
        """Return what a request's bearer token permits; None without a token of this job, if it has one."""
        if self._authenticator is None:
            return Grant(Role.RUN)
        authorization = headers.get(b"authorization", b"")
        if not authorization.startswith(_BEARER):
            return None
        given = authorization[len(_BEARER) :]
        found = next((grant for grant, text in self._bearers if hmac.compare_digest(given, text)), None)
        if found is None:
            text = given.decode("latin-1")
            job = job_of(text)
            derived = () if job is None else self._credentials.of_job(job, lease_of(text))
            found = next((grant for grant, each in derived if hmac.compare_digest(given, each.encode())), None)
        return found

    def _is_private(self, scope: Message) -> bool:
        """Return whether no network sees a request: it comes from this host, over TLS, or the network is private."""
        client, server = scope.get("client"), scope.get("server")
        if self._private_network or scope.get("scheme") == "https":
            return True
        if client is None or not _is_address(client[0]):  # not a TCP connection
            return True
        return is_loopback(client[0].removeprefix("::ffff:")) or (server is not None and client[0] == server[0])

    def _check(
        self, scope: Message, headers: dict[bytes, bytes], limit: int, held: Grant | None, in_clear: bool
    ) -> Problem | None:
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
        if scope["path"] not in self._open:
            if held is None and b" " in headers.get(b"authorization", b"").strip():  # an empty variable gives no token
                _warn_of_another_token(scope)
                return _unauthenticated(_ANOTHER_TOKEN)
            rejection = _check_role(held, self._role_of(scope["method"], scope["path"]), in_clear)
            if rejection is None and held is not None:
                scope["state"] = {**scope.get("state", {}), "grant": held}
                rejection = None if held.job is None else self._check_job(scope, held)
            if rejection is not None:
                return rejection
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _MOST_DIGITS or int(length) > limit:
            return _too_large(limit)
        return None

    def _check_job(self, scope: Message, grant: Grant) -> Problem | None:
        """Restrict a request to the job of its credential; return why that is not possible."""
        try:
            self._confine(scope, grant)
        except DistError as error:
            return problem_of(error)
        return None

    def _limit_unauthenticated(self, address: str) -> Problem | None:
        """Count a request without a right credential; return the response if its address has sent too many."""
        if self._unauthenticated.allows(address):
            return None
        if self._warning.is_due():
            _log.warning(
                "%s sends more than %d requests a second without a right credential, which get 429",
                address,
                UNAUTHENTICATED_A_SECOND,
            )
        return problem(
            429, "too-many-attempts", f"{address} has sent too many requests without the job's token: wait, or send it"
        )

    def _is_known_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return _is_address(host)
        name, address = match.groups()
        return name in self._names or _is_address(name or address)


def _joined(fields: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return header fields by name; one of several lines has all of their values (RFC 9110, section 5.3).

    The application may use any of the lines, so a check of one of them is no check.
    """
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


def _unauthenticated(detail: str) -> Problem:
    return problem(401, "unauthenticated", detail)


def _warn_of_another_token(scope: Message) -> None:
    client = scope.get("client")
    peer = f"a client at {client[0]}" if client else "a client"
    warn_refused(AuthenticationError(f"{peer} has another token than this service"))


def _check_role(held: Grant | None, needed: Role, in_clear: bool) -> Problem | None:
    """Return why a request is rejected; None if the role that its client holds includes the one that it needs."""
    if held is None:
        return _unauthenticated("send the job's token: Authorization: Bearer $RANKMESH_TOKEN")
    if in_clear:
        return problem(
            403,
            "cleartext-token",
            "a bearer token is accepted from this host (127.0.0.1, or through 'ssh -L'), over https, or from a network "
            "that RANKMESH_PRIVATE_NETWORK=1 declares private at the server; the 'rankmesh' command works from "
            "everywhere, as it does not send the token",
        )
    if held.role < needed:
        remedy = " ('rankmesh token --job JOB --lease ID' prints it)" if needed is Role.LEASE else ""
        return problem(
            403,
            "forbidden-role",
            f"this needs a credential of the role {needed.name.lower()!r}{remedy}; the one given has the role "
            f"{held.role.name.lower()!r}",
        )
    return None


class _Response:
    """A response to a client; the proof goes into its head: of its body, too, if that comes in one piece.

    Args:
        caller: the client; None for one that does not expect a proof.
        send: of the request.

    Attributes:
        started: whether there is a response.
    """

    def __init__(self, caller: AuthenticatedClient | None, send: Send) -> None:
        self._caller = caller
        self._send = send
        self._head: Message | None = None
        self.started = False

    async def send(self, message: Message) -> None:
        """Send a message; the head with the first piece of the body."""
        self.started = True
        if self._caller is not None:
            if message["type"] == "http.response.start":
                self._head = message
                return
            if self._head is not None:
                head, self._head = self._head, None
                body = message.get("body", b"")
                complete = not message.get("more_body") or (b"content-length", b"%d" % len(body)) in head["headers"]
                info = self._caller.sign_response(head["status"], digest(body) if complete else STREAM)
                await self._send({**head, "headers": [*head["headers"], (_INFO, info.encode())]})
        await self._send(message)


async def send_problem(document: Problem, send: Send, *, challenge: str = "", close: bool = True) -> None:
    """Respond to a request with a problem document.

    Args:
        document: the document.
        send: of the request.
        challenge: value of the header WWW-Authenticate; that of bearer tokens if empty.
        close: whether to end the connection: the request's body may not have been read.
    """
    headers, body = encode_problem(document)
    if document.status == 429:
        headers.append((b"retry-after", b"1"))
    if document.status == 401:
        headers.append((b"www-authenticate", challenge.encode() or b'Bearer realm="rankmesh"'))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": document.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
