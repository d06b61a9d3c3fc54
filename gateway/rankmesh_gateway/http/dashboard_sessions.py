"""Sessions of the dashboard, so that its user types no token, and no URL has one.

::

    rankmesh dashboard   POST /v1/dashboard/codes      a one-time code, for a client that proves a credential
    browser              GET /#code=CODE               the page; a fragment is not sent
    page                 POST /v1/dashboard/sessions   the code as its bearer token, in exchange for a session's
    page                 GET /v1/…                     the session's, with which a request has the role read

A bearer token of a session stands for the credential of the role ``read``. The checks of SecurityMiddleware apply to it
as to that credential: it is not accepted from a network in clear.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from rankmesh_agent.http.middleware import Message
from rankmesh_agent.wire.credentials import Credentials, Role
from rankmesh_agent.wire.errors import AuthenticationError

CODE_SECONDS = 300
"""Lifetime of a code."""
SESSION_SECONDS = 12 * 3600
"""Lifetime of a session."""
MAX_TOKENS = 1000
"""Limit of codes, and of sessions; a new one replaces the oldest."""
CODES_PATH = "/v1/dashboard/codes"
"""Where a session is not accepted: it cannot outlive itself."""
EXCHANGE_PATH = "/v1/dashboard/sessions"
"""Where a code is accepted, and no session."""
_BEARER = b"Bearer "
_PREFIX = b"rankmesh-dashboard-"


class _Tokens:
    """Random tokens that expire. Only their digests are kept."""

    def __init__(self, prefix: bytes, lifetime: float, clock: Callable[[], float]) -> None:
        self._prefix = prefix
        self._lifetime = lifetime
        self._clock = clock
        self._ends: dict[bytes, float] = {}

    def create(self) -> str:
        token = self._prefix.decode() + secrets.token_urlsafe(32)
        if len(self._ends) >= MAX_TOKENS:
            del self._ends[next(iter(self._ends))]
        self._ends[_digest(token.encode())] = self._clock() + self._lifetime
        return token

    def __contains__(self, token: bytes) -> bool:
        return self._ends.get(_digest(token), 0.0) > self._clock()

    def remove(self, token: bytes) -> bool:
        """Remove a token; return whether it was valid."""
        return self._ends.pop(_digest(token), 0.0) > self._clock()


class DashboardSessions:
    """The codes and sessions of a gateway. For the thread of its event loop.

    Args:
        credentials: of the gateway's clients.
        clock: monotonic seconds; tests pass their own.
    """

    def __init__(self, credentials: Credentials, clock: Callable[[], float] = time.monotonic) -> None:
        self._credential = _BEARER + credentials.of_role(Role.READ).encode()
        self._codes = _Tokens(_PREFIX + b"code-", CODE_SECONDS, clock)
        self._sessions = _Tokens(_PREFIX + b"session-", SESSION_SECONDS, clock)

    def create_code(self) -> str:
        """Return a new code."""
        return self._codes.create()

    def exchange(self, authorization: str) -> str:
        """Return the token of a new session.

        Args:
            authorization: the header with the code, which is used up.

        Raises:
            AuthenticationError: the code is unknown, has been used or has expired.
        """
        if not self._codes.remove(authorization.encode().removeprefix(_BEARER)):
            raise AuthenticationError("the link has been used or has expired: 'rankmesh dashboard' prints another")
        return self._sessions.create()

    def translate(self, authorization: bytes, scope: Message) -> bytes:
        """Return the Authorization header for which one stands: the credential for that of a session or a code.

        Args:
            authorization: the header.
            scope: the request's; at EXCHANGE_PATH a code counts, elsewhere a session.

        Returns:
            The header itself if it is neither; an empty one if the session or the code is not valid.
        """
        if not authorization.startswith(_BEARER + _PREFIX):
            return authorization
        tokens = self._codes if scope["path"] == EXCHANGE_PATH else self._sessions
        valid = authorization.removeprefix(_BEARER) in tokens and scope["path"] != CODES_PATH
        return self._credential if valid else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
