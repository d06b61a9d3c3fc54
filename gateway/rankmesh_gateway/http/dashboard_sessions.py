"""Sessions of the dashboard, so that its user types no token, and no URL has one.

::

    rankmesh dashboard   POST /v1/dashboard/codes      a one-time code, for a client with a credential
    browser              GET /#code=CODE               the page; a fragment is not sent
    page                 POST /v1/dashboard/sessions   the code as its bearer token, in exchange for a session's cookie
    page                 GET /v1/…                     with the cookie, with which a request has the role read
    page                 DELETE /v1/dashboard/sessions the end of the session

A session's token, as a cookie or as a bearer token, stands for the credential of the role ``read``, of the job of the
credential for which the code was made if that is a job's. If that one has the role ``run``, the session gets the stacks
of ranks, too. The checks of SecurityMiddleware apply to it as to that credential: it is not accepted from a network in
clear.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable

from rankmesh_agent.http.middleware import Message
from rankmesh_agent.wire.credentials import Credentials, Grant, Role, derive, for_job
from rankmesh_agent.wire.errors import AuthenticationError

CODE_SECONDS = 300
"""Lifetime of a code."""
SESSION_SECONDS = 12 * 3600
"""Lifetime of a session."""
MAX_TOKENS = 1000
"""Limit of codes, and of sessions; a new one replaces the oldest."""
CODES_PATH = "/v1/dashboard/codes"
"""Path that accepts no session, as a session must not renew itself."""
EXCHANGE_PATH = "/v1/dashboard/sessions"
"""Path that accepts a code, and no session."""
_STACKS = re.compile(r"/v1/ranks/[^/]+/snapshot")
"""Paths that need the role ``run`` though they change nothing."""
_BEARER = b"Bearer "
_PREFIX = b"rankmesh-dashboard-"


class _Tokens:
    """Random tokens that expire. Only their digests are kept."""

    def __init__(self, prefix: bytes, lifetime: float, clock: Callable[[], float]) -> None:
        self._prefix = prefix
        self._lifetime = lifetime
        self._clock = clock
        self._ends: dict[bytes, tuple[float, Grant]] = {}
        """By digest, the clock at the end, and the rights of the credential for which it was made."""

    def create(self, grant: Grant) -> str:
        token = self._prefix.decode() + secrets.token_urlsafe(32)
        if len(self._ends) >= MAX_TOKENS:
            del self._ends[next(iter(self._ends))]
        self._ends[_digest(token.encode())] = self._clock() + self._lifetime, grant
        return token

    def find(self, token: bytes) -> Grant | None:
        """Return the rights of the credential for which a token was made; None if it is unknown or has expired."""
        end, grant = self._ends.get(_digest(token), (0.0, None))
        return grant if self._clock() < end else None

    def remove(self, token: bytes) -> None:
        """Remove a token."""
        self._ends.pop(_digest(token), None)


class DashboardSessions:
    """The codes and sessions of a gateway. For the thread of its event loop."""

    def __init__(self, credentials: Credentials, clock: Callable[[], float] = time.monotonic) -> None:
        self._credentials = credentials
        self._codes = _Tokens(_PREFIX + b"code-", CODE_SECONDS, clock)
        self._sessions = _Tokens(_PREFIX + b"session-", SESSION_SECONDS, clock)

    def create_code(self, grant: Grant) -> str:
        """Return a new code for a client whose credential has these rights."""
        return self._codes.create(grant)

    def end(self, token: bytes) -> None:
        """End a session."""
        self._sessions.remove(token)

    def exchange(self, authorization: str) -> str:
        """Return the token of a new session."""
        code = authorization.encode().removeprefix(_BEARER)
        grant = self._codes.find(code)
        if grant is None:
            raise AuthenticationError("the link has been used or has expired: 'rankmesh dashboard' prints another")
        self._codes.remove(code)
        return self._sessions.create(grant)

    def translate(self, authorization: bytes, scope: Message) -> bytes:
        """Return the Authorization header for which one stands: the credential for that of a session or a code.

        Args:
            scope: the request's; a code counts for the exchange alone, a session elsewhere; without the header, its
                cookie counts.

        Returns:
            The header itself if it is neither; an empty one if the session or the code is not valid.
        """
        authorization = authorization or _BEARER + cookie_of(scope)
        if authorization == _BEARER:
            return b""
        if not authorization.startswith(_BEARER + _PREFIX):
            return authorization
        is_exchange = (scope["method"], scope["path"]) == ("POST", EXCHANGE_PATH)
        tokens = self._codes if is_exchange else self._sessions
        grant = tokens.find(authorization.removeprefix(_BEARER))
        if grant is None or scope["path"] == CODES_PATH:
            return b""
        sees_stacks = grant.role is Role.RUN and scope["method"] == "GET" and _STACKS.fullmatch(scope["path"])
        role = Role.RUN if sees_stacks else Role.READ
        if grant.job is None:
            return _BEARER + self._credentials.of_role(role).encode()
        return _BEARER + derive(for_job(self._credentials.run, grant.job), role).encode()


def cookie_name(host: bytes) -> str:
    """Return the name of the cookie for a Host header: browsers send the cookies of a host to all of its ports."""
    port = re.search(rb":(\d{1,5})$", host)
    return f"rankmesh-session-{port[1].decode() if port else 'default'}"


def cookie_of(scope: Message) -> bytes:
    """Return the token in a request's cookie; empty without one, and in a request of another port's or site's page."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if b"cookie" not in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return b""
    name = cookie_name(headers.get(b"host", b"")).encode()
    cookies = (each.strip().partition(b"=") for each in headers[b"cookie"].split(b";"))
    token = next((value for field, _, value in cookies if field == name), b"")
    return token if token.startswith(_PREFIX) else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
