"""HTTP's authentication scheme ``RankMesh``: like Digest (RFC 7616), but mutual and with HMAC-SHA256. Pure: no I/O.

A client's first request to a server has no content::

    Authorization: RankMesh key="ID", client="RANDOM", count="1"
    WWW-Authenticate: RankMesh nonce="RANDOM", mac="MAC"                 in the response 401

The server thereby proves that it knows the credential, before the client sends it anything. Every other request has a
proof, and so has its response::

    Authorization: RankMesh key="ID", client="RANDOM", count="2", nonce="RANDOM", body="DIGEST", mac="MAC"
    Authentication-Info: body="DIGEST", mac="MAC"

The MAC of a request covers nonce, client, count, Host, method, target, the header fields COVERED, and the SHA-256
digest of the body; that of a response nonce, client, count, status and digest. The nonce is the server's, which refuses
a count that it has seen. The digest of a response that is a stream is "-": only its status is authenticated.

A credential of one job, or of a lease for it, is named besides by ``job="NAME"``, in hexadecimal digits of UTF-8, and
``lease="ID"`` behind the key's id: a server derives its key from the token.

The scheme hides nothing, which takes TLS. A process in the way may also pass a request on to another server of the same
credential: addresses change on the way, so the proof does not bind them.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import json
import re
import secrets
from collections.abc import Generator, Mapping
from http import HTTPStatus
from typing import NamedTuple

from rankmesh_agent.wire.credentials import Credentials, Grant, Role, hkdf, job_of, key_material, lease_of, remedy

SCHEME = "RankMesh "
INFO = "Authentication-Info"
UNKNOWN_KEY = SCHEME + 'realm="rankmesh"'
"""Value of WWW-Authenticate for a client whose credential is not accepted."""
STREAM = "-"
"""Digest of a body that is a stream."""
COVERED = (
    "content-type",
    "if-match",
    "if-none-match",
    "idempotency-key",
    "rankmesh-dtype",
    "rankmesh-shape",
)
"""Header fields of a request, in lower case, that change what it does."""
MAX_CLIENTS = 1 << 16
"""Clients whose counts a server remembers; it begins anew, with another nonce, when there are more."""
_WINDOW = 1024
"""Counts below a client's highest one that a server still accepts: requests overtake each other."""
_SEEN_ALL = (1 << _WINDOW) - 1
_PARAMETER = re.compile(r'([a-z]+)="([0-9a-f-]{1,2048})"')
_MAX_DIGITS = 18
_LEASE_DIGITS = 32


def digest(body: bytes | bytearray | memoryview) -> str:
    """Return the digest of a body."""
    return hashlib.sha256(body).hexdigest()


_EMPTY = digest(b"")


@functools.lru_cache(256)
def _keys(credential: str) -> tuple[str, bytes]:
    """Return the public id of a credential, and the key of its MACs."""
    secret = key_material(credential)
    return hkdf(secret, "rankmesh http id").hex()[:16], hkdf(secret, "rankmesh http")


@functools.lru_cache(256)
def _keys_of_job(credentials: Credentials, job: str, lease: str) -> dict[str, tuple[Grant, bytes]]:
    """Return the grants and keys of the credentials of a job, or of a lease, by their ids.

    Args:
        credentials: of a server.
        job: the job in the format of a proof.
        lease: the lease; empty for none.
    """
    try:
        name = bytes.fromhex(job).decode("utf-8", "surrogatepass")
    except ValueError:
        return {}
    if not name or (lease and len(lease) != _LEASE_DIGITS) or "-" in lease:
        return {}
    return {key_id: (grant, key) for grant, text in credentials.of_job(name, lease) for key_id, key in [_keys(text)]}


def _mac(key: bytes, *fields: str) -> str:
    """Return the MAC of fields of an HTTP head, none of which can contain a line break."""
    return hmac.digest(key, "\n".join(fields).encode("latin-1", "replace"), "sha256").hex()


def _parameters(text: str) -> dict[str, str]:
    return dict(_PARAMETER.findall(text))


def _covered(headers: Mapping[str, str]) -> list[str]:
    return [headers.get(name, "") for name in COVERED]


class SignedRequest(NamedTuple):
    """A request's proof, and what the response must prove.

    Attributes:
        authorization: value of the Authorization header.
    """

    authorization: str
    key: bytes
    nonce: str
    client: str
    number: str

    def digest_of_response(self, status: int, info: str) -> str | None:
        """Return the digest of a response's body; None if the response does not prove that it is the server's.

        Args:
            status: the response's status.
            info: its Authentication-Info header; empty for none.
        """
        found = _parameters(info)
        body = found.get("body", "")
        expected = _mac(self.key, "response", self.nonce, self.client, self.number, str(status), body)
        return body if hmac.compare_digest(found.get("mac", ""), expected) else None


class ServerSession:
    """A server, as seen by its clients in one process. For any number of threads.

    Args:
        credential: the clients' credential.
    """

    def __init__(self, credential: str) -> None:
        key_id, self._key = _keys(credential)
        job, lease = job_of(credential), lease_of(credential)
        named = "" if job is None else f', job="{job.encode("utf-8", "surrogatepass").hex()}"'
        self._named = f'{SCHEME}key="{key_id}"{named}' + (f', lease="{lease}"' if lease else "")
        self._client = secrets.token_hex(8)
        self._counts = itertools.count(1)
        self._nonce = ""

    @property
    def is_open(self) -> bool:
        """True once the server has proved that it knows the credential: requests can be signed."""
        return bool(self._nonce)

    def hello(self) -> SignedRequest:
        """Return the proofless header of the first request."""
        count = str(next(self._counts))
        text = f'{self._named}, client="{self._client}", count="{count}"'
        return SignedRequest(text, self._key, "", self._client, count)

    def sign(self, method: str, target: str, host: str, headers: Mapping[str, str], body: bytes = b"") -> SignedRequest:
        """Return the proof of a request.

        Args:
            method: its method.
            target: its path and query, as sent.
            host: its Host header.
            headers: its other headers, by name in lower case.
            body: its body.
        """
        text, key, _, client, count = self.hello()
        nonce, content = self._nonce, digest(body) if body else _EMPTY
        mac = _mac(key, "request", nonce, client, count, host, method, target, *_covered(headers), content)
        return SignedRequest(f'{text}, nonce="{nonce}", body="{content}", mac="{mac}"', key, nonce, client, count)

    def accept_challenge(self, sent: SignedRequest, challenge: str) -> bool:
        """Take the server's nonce from a response 401; return whether the server has proved itself.

        Args:
            sent: the request.
            challenge: the response's WWW-Authenticate header; empty for none.
        """
        found = _parameters(challenge)
        nonce = found.get("nonce", "")
        expected = _mac(self._key, "challenge", sent.client, sent.number, nonce)
        if not nonce or not hmac.compare_digest(found.get("mac", ""), expected):
            return False
        self._nonce = nonce
        return True


class PreparedRequest(NamedTuple):
    """A request to send: the caller's own, or the one before it.

    Attributes:
        authorization: value of its Authorization header; it has no other header if it is not the caller's own.
        own: whether it is the caller's own.
    """

    authorization: str
    own: bool = True


HELLO_METHOD, HELLO_TARGET = "GET", "/livez"
"""Method and target of a request that is not the caller's own."""


class ReceivedResponse(NamedTuple):
    """A response that has been received.

    Attributes:
        status: its status.
        challenge: its WWW-Authenticate header; empty for none.
        info: its Authentication-Info header; empty for none.
        body: its body, as received; None if only its head has been received.
    """

    status: int
    challenge: str
    info: str
    body: bytes | None = None


NEEDS_TLS = "it takes connections with TLS alone: set RANKMESH_TLS_CA, RANKMESH_TLS_CERT and RANKMESH_TLS_KEY here, too"


def needs_tls(status: int, body: bytes) -> bool:
    """Return whether a response is that of a port for TLS to a request without: RankMesh's, nginx's or Go's."""
    return status == HTTPStatus.BAD_REQUEST and b"HTTPS" in body[:1000]


class MissingProofError(Exception):
    """A response without the proof that its sender knows the credential.

    Args:
        status: its status.
        body: its body.

    Attributes:
        status: its status.
        retryable: whether it may be that of a server that starts or ends, or has no room.
    """

    def __init__(self, status: int, body: bytes = b"") -> None:
        super().__init__(
            NEEDS_TLS
            if needs_tls(status, body)
            else f"it answers {status} without the proof that it knows the token: another program has the port, or "
            "RankMesh there has no token, or is of another version"
        )
        self.status = status
        self.retryable = status in (429, 500, 502, 503, 504)


def refusal(credential: str) -> bytes:
    """Return the problem document in place of the body of a response 401 without a proof."""
    return json.dumps(
        {
            "type": "about:blank",
            "title": HTTPStatus.UNAUTHORIZED.phrase,
            "status": HTTPStatus.UNAUTHORIZED,
            "detail": f"its token is another one than that given: {remedy(credential)}",
            "code": "unauthenticated",
        }
    ).encode()


def exchange(
    session: ServerSession, method: str, target: str, host: str, headers: Mapping[str, str], body: bytes = b""
) -> Generator[PreparedRequest, ReceivedResponse, bool]:
    """Yield requests to send, and receive their responses; return whether the last one is the server's.

    Otherwise it is a refusal, a response 401, of which nothing else may be used.

    Args:
        session: the session with the server.
        method, target, host, headers, body: of the request, see ServerSession.sign.

    Raises:
        MissingProofError: a response is not the server's.
    """
    if not session.is_open:
        hello = session.hello()
        response = yield PreparedRequest(hello.authorization, own=False)
        if not session.accept_challenge(hello, response.challenge):
            return _refused(response)
    signed = session.sign(method, target, host, headers, body)
    response = yield PreparedRequest(signed.authorization)
    if response.status == HTTPStatus.UNAUTHORIZED and session.accept_challenge(signed, response.challenge):
        signed = session.sign(method, target, host, headers, body)
        response = yield PreparedRequest(signed.authorization)
    content = signed.digest_of_response(response.status, response.info)
    if content is None or (response.body is not None and content != digest(response.body)):
        return _refused(response)
    return True


def _refused(response: ReceivedResponse) -> bool:
    if response.status != HTTPStatus.UNAUTHORIZED:
        raise MissingProofError(response.status, response.body or b"")
    return False


class AuthenticatedClient(NamedTuple):
    """The client of an authenticated request.

    Attributes:
        grant: what its credential permits.
        content: digest of the request's body.
    """

    grant: Grant
    content: str
    key: bytes
    nonce: str
    client: str
    number: str

    def sign_response(self, status: int, content: str) -> str:
        """Return the Authentication-Info header of the response with a status, and a body of a digest."""
        mac = _mac(self.key, "response", self.nonce, self.client, self.number, str(status), content)
        return f'body="{content}", mac="{mac}"'


class Authenticator:
    """A server's side. For one thread.

    Args:
        credentials: of the clients.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._grants: dict[str, tuple[Grant, bytes]] = {}
        for grant, credential in credentials.sufficient(Role.READ):
            key_id, key = _keys(credential)
            self._grants.setdefault(key_id, (grant, key))
        self._begin()

    def _begin(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._seen: dict[str, tuple[int, int]] = {}
        """By client, its highest count, and a bit for each one seen below."""

    def authenticate(
        self, authorization: str, method: str, target: str, host: str, headers: Mapping[str, str]
    ) -> AuthenticatedClient | str:
        """Return the client of a request, or the WWW-Authenticate header of its refusal.

        Args:
            authorization: the Authorization header.
            method, target, host, headers: see ServerSession.sign.
        """
        found = _parameters(authorization)
        client, count, content = found.get("client", ""), found.get("count", ""), found.get("body", "")
        key_id = found.get("key", "")
        known = self._grants.get(key_id)
        if known is None and "job" in found:
            known = _keys_of_job(self._credentials, found["job"], found.get("lease", "")).get(key_id)
        if known is None:
            return UNKNOWN_KEY
        grant, key = known
        if found.get("nonce") == self._nonce and count.isdigit() and len(count) <= _MAX_DIGITS:
            expected = _mac(
                key, "request", self._nonce, client, count, host, method, target, *_covered(headers), content
            )
            if hmac.compare_digest(found.get("mac", ""), expected) and self._is_new(client, int(count)):
                return AuthenticatedClient(grant, content, key, self._nonce, client, count)
        mac = _mac(key, "challenge", client, count, self._nonce)
        return f'{SCHEME}nonce="{self._nonce}", mac="{mac}"'

    def _is_new(self, client: str, count: int) -> bool:
        """Return whether a count of a client is used for the first time, and remember it."""
        if client not in self._seen and len(self._seen) >= MAX_CLIENTS:
            self._begin()
            return False
        highest, seen = self._seen.get(client, (0, 0))
        ahead = count - highest
        if ahead > 0:
            self._seen[client] = count, (((seen << ahead) | 1) & _SEEN_ALL) if ahead < _WINDOW else 1
            return True
        if ahead <= -_WINDOW or seen >> -ahead & 1:
            return False
        self._seen[client] = highest, seen | 1 << -ahead
        return True
