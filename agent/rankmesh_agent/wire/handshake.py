"""The mutual challenge at the start of every fast-path connection, before any frame. Pure: this module performs no I/O.

::

    client → server   HELLO   magic, version and WANTS_MACS, client nonce        40 bytes
    server → client   HELLO   magic, version and WANTS_MACS, server nonce        40 bytes
    client → server   PROOF   HMAC(key, "client", context)                       32 bytes, then those of the attachment
    server → client   PROOF   HMAC(key, "server", context)                       32 bytes

    key       HKDF-SHA256 of the credential
    context   protocol, channel binding, attachment, both nonces; the two WANTS_MACS bytes, if one is set

A server that does not accept the client's proof answers with 32 zero bytes and closes the connection; one that closes
it without them has failed, or has no descriptors left.

Each side proves that it knows the credential without sending it. Fresh nonces make the replay of a recorded handshake
useless, and "client" and "server" prevent reflection. A relayed proof is worth nothing at a server of another protocol,
or over another TLS connection: the context differs. The client sends its proof first, so a port scan reveals nothing.
All messages have a fixed size: no data of an unauthenticated peer determines the number of bytes read.

With WANTS_MACS an end finds that the connection leaves its host without TLS, and its operator has not declared the
network private. If one of them does, all that follows has
MACs (``net.mac_socket``); who removes the flag on the way makes the proofs invalid.

The attachment names the server that the client means, where it has a name that both ends know: an agent's id where a
process attaches; the instances of both ranks in the mesh. Never an address, which port forwarding changes. The owner of
a store or a snapshot may change, and a TCPStore has no name, so these protocols have none.
"""

from __future__ import annotations

import enum
import functools
import hmac
import secrets
import struct
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from rankmesh_agent.wire.credentials import Credentials, Grant, Role, encode, hkdf, key_material
from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.version import PROTOCOL_VERSION

MAGIC = b"RKMH-HI"
_HELLO = struct.Struct("!7sB32s")
HELLO_BYTES = _HELLO.size
WANTS_MACS = 0x80
"""A flag in the byte of the version."""
PROOF_BYTES = 32
_REFUSAL = bytes(PROOF_BYTES)

T = TypeVar("T")


class ClientRefusedError(AuthenticationError):
    """At the server: the client has another token."""


Script = Generator[tuple[bytes, int], bytes, T]
"""One side of a handshake: yields the bytes to send and the number of bytes to receive, gets the received bytes, and
returns its result. An error of the connection is thrown into it. ``net.handshake`` runs it."""


class Protocol(enum.Enum):
    """Protocol behind a challenge, and the role that its clients need."""

    MESH = "mesh", Role.RUN
    STORE = "store", Role.USE
    ATTACH = "attach", Role.RUN
    SNAPSHOT = "snapshot", Role.RUN

    def __init__(self, label: str, role: Role) -> None:
        self.label = label
        self.role = role


class Challenge:
    """One side of the challenge.

    Args:
        token: the client's credential, or those that the server accepts; an empty token is valid (jobs on loopback may
            have none). A server may have a function of the attachment that returns them.
        protocol: the protocol that follows.
        client: whether this side opened the connection.
        binding: channel binding of the TLS connection that carries the challenge (RFC 9266); empty without TLS.
        wants_macs: whether this side wants MACs on what follows the challenge.

    Attributes:
        is_client: whether this side opened the connection.
        attachment: the bytes that follow the client's proof; both proofs cover them.
        grant: at the server, what the client's credential permits, after its proof.
    """

    def __init__(
        self,
        token: str | Credentials | Callable[[bytes], str | Credentials],
        protocol: Protocol,
        *,
        client: bool,
        binding: bytes = b"",
        wants_macs: bool = False,
    ) -> None:
        self._token = token
        self._key = _key(token) if isinstance(token, str) else b""
        self.grant = Grant(Role.RUN)
        self._protocol = protocol
        self._fields = protocol.label.encode(), binding
        self.is_client = client
        self._flags = WANTS_MACS if wants_macs else 0
        self._both_flags = b""
        self._nonce = secrets.token_bytes(32)
        self._both = b""
        self.attachment = b""

    def hello(self) -> bytes:
        """Return this side's HELLO."""
        return _HELLO.pack(MAGIC, PROTOCOL_VERSION | self._flags, self._nonce)

    def receive_hello(self, data: bytes) -> None:
        """Process the other side's HELLO.

        Raises:
            ProtocolError: the bytes are not RankMesh's, or have another version.
        """
        magic, byte, nonce = _HELLO.unpack(data)
        version, flags = byte & ~WANTS_MACS, byte & WANTS_MACS
        if magic != MAGIC:
            raise ProtocolError("the other side of the connection does not speak RankMesh's protocol")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the other side speaks protocol version {version}, this one {PROTOCOL_VERSION}: upgrade the older"
            )
        self._both = self._nonce + nonce if self.is_client else nonce + self._nonce
        self._both_flags = bytes((self._flags, flags) if self.is_client else (flags, self._flags))

    @property
    def name(self) -> bytes:
        """Unique name of the connection at both sides, after the HELLOs: 64 bytes."""
        return self._both

    @property
    def macs(self) -> bool:
        """True if the data after the challenge have MACs: if one side's HELLO wants them. After the HELLOs."""
        return any(self._both_flags)

    def proof(self) -> bytes:
        """Return this side's proof that it knows the credential."""
        return self._mac(self._key, self.is_client)

    def receive_proof(self, data: bytes) -> None:
        """Check the other side's proof.

        Raises:
            AuthenticationError: the other side does not know the credential.
        """
        for grant, credential in self._accepted():
            key = _key(credential)
            if hmac.compare_digest(data, self._mac(key, not self.is_client)):
                self.grant, self._key = grant, key
                return
        raise AuthenticationError("the other side has another token: RANKMESH_TOKEN must be the same on every rank")

    def session_key(self, purpose: str) -> bytes:
        """Return a key for one purpose that both ends know after the proofs, and no process without the credential.

        It has no forward secrecy: who learns the credential can derive the keys of recorded connections.
        """
        return hkdf(self._key, f"rankmesh session {purpose}", self._both, self._context())

    def _accepted(self) -> Iterable[tuple[Grant, str]]:
        token = self._token(self.attachment) if callable(self._token) else self._token
        if isinstance(token, str) and self.is_client:
            return [(Grant(Role.RUN), token)]
        return Credentials.of(token).sufficient(self._protocol.role)

    def _mac(self, key: bytes, client: bool) -> bytes:
        return hmac.digest(key, encode(b"client" if client else b"server") + self._context(), "sha256")

    def _context(self) -> bytes:
        return encode(*self._fields, self.attachment, self._both) + (self._both_flags if self.macs else b"")


@functools.lru_cache(256)
def _key(credential: str) -> bytes:
    return hkdf(key_material(credential), "rankmesh challenge")


def client_hello(challenge: Challenge) -> Script[Challenge]:
    """Exchange HELLOs as the client."""
    challenge.receive_hello((yield challenge.hello(), HELLO_BYTES))
    return challenge


def client_proof(
    challenge: Challenge, refusal: AuthenticationError, attachment: bytes = b"", reply_bytes: int = 0
) -> Script[bytes]:
    """Exchange proofs as the client; return what follows the server's proof.

    Args:
        challenge: the challenge after the HELLOs.
        refusal: raised if the server has another token.
        attachment: sent after the proof, which covers it.
        reply_bytes: number of bytes that follow the server's proof.
    """
    challenge.attachment = attachment
    try:
        challenge.receive_proof((yield challenge.proof() + attachment, PROOF_BYTES))
    except AuthenticationError:
        raise refusal from None
    return (yield b"", reply_bytes) if reply_bytes else b""


def verify_client(challenge: Challenge, attachment_bytes: int = 0) -> Script[None]:
    """Check the client as the server, whose proof must follow."""
    challenge.receive_hello((yield b"", HELLO_BYTES))
    message = yield challenge.hello(), PROOF_BYTES + attachment_bytes
    challenge.attachment = message[PROOF_BYTES:]
    try:
        challenge.receive_proof(message[:PROOF_BYTES])
    except AuthenticationError as error:
        yield _REFUSAL, 0
        raise ClientRefusedError(error.message) from None


def client_script(challenge: Challenge, refusal: AuthenticationError, attachment: bytes = b"") -> Script[Challenge]:
    """Run the whole challenge as the client, and return it."""
    yield from client_hello(challenge)
    yield from client_proof(challenge, refusal, attachment)
    return challenge


def server_script(challenge: Challenge, attachment_bytes: int = 0) -> Script[Challenge]:
    """Run the whole challenge as the server, and return it."""
    yield from verify_client(challenge, attachment_bytes)
    yield challenge.proof(), 0
    return challenge
