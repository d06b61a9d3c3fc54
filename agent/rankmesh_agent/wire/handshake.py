"""The mutual challenge at the start of every fast-path connection, before any frame. Pure: this module performs no I/O.

::

    client → server   HELLO   magic, version, client nonce                       40 bytes
    server → client   HELLO   magic, version, server nonce                       40 bytes
    client → server   PROOF   HMAC(token, "client", both nonces)                 32 bytes
    server → client   PROOF   HMAC(token, "server", both nonces)                 32 bytes

A server that does not accept the client's proof answers with 32 zero bytes and closes the connection; one that closes
it without them has failed, or has no descriptors left.

Each side proves that it knows the token without sending it. Fresh nonces make the replay of a recorded handshake
useless, and the role in the proof prevents reflection. The client sends its proof first, so a port scan reveals
nothing. All messages have a fixed size: no data of an unauthenticated peer determines the number of bytes read.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator
from typing import TypeVar

from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.frames import VERSION

MAGIC = b"RKMH-HI"
_HELLO = struct.Struct("!7sB32s")
HELLO_BYTES = _HELLO.size
PROOF_BYTES = 32
_REFUSAL = bytes(PROOF_BYTES)

T = TypeVar("T")
Script = Generator[tuple[bytes, int], bytes, T]
"""One side of a handshake: yields the bytes to send and the number of bytes to receive, gets the received bytes, and
returns its result. An error of the connection is thrown into it. ``net.handshake`` runs it."""


class Challenge:
    """One side of the challenge.

    Args:
        token: the job's secret; an empty token is valid (jobs on loopback may have none).
        client: whether this side opened the connection.
    """

    def __init__(self, token: str, *, client: bool) -> None:
        self._key = token.encode()
        self._client = client
        self._nonce = secrets.token_bytes(32)
        self._both = b""

    def hello(self) -> bytes:
        """Return this side's HELLO."""
        return _HELLO.pack(MAGIC, VERSION, self._nonce)

    def receive_hello(self, data: bytes) -> None:
        """Process the other side's HELLO.

        Raises:
            ProtocolError: the bytes are not RankMesh's, or have another version.
        """
        magic, version, nonce = _HELLO.unpack(data)
        if magic != MAGIC:
            raise ProtocolError("the other side of the connection does not speak RankMesh's protocol")
        if version != VERSION:
            raise ProtocolError(
                f"the other side speaks protocol version {version}, this one {VERSION}: upgrade the older"
            )
        self._both = self._nonce + nonce if self._client else nonce + self._nonce

    @property
    def name(self) -> bytes:
        """Unique name of the connection at both sides, after the HELLOs: 64 bytes."""
        return self._both

    def proof(self) -> bytes:
        """Return this side's proof that it knows the token."""
        return self._mac(self._client)

    def receive_proof(self, data: bytes) -> None:
        """Check the other side's proof.

        Raises:
            AuthenticationError: the other side does not know the token.
        """
        if not hmac.compare_digest(data, self._mac(not self._client)):
            raise AuthenticationError("the other side has another token: RANKMESH_TOKEN must be the same on every rank")

    def _mac(self, client: bool) -> bytes:
        return hmac.digest(self._key, (b"client" if client else b"server") + self._both, "sha256")


def client_hello(token: str) -> Script[Challenge]:
    """Exchange HELLOs as the client."""
    challenge = Challenge(token, client=True)
    challenge.receive_hello((yield challenge.hello(), HELLO_BYTES))
    return challenge


def client_proof(
    challenge: Challenge, refusal: AuthenticationError, attachment: bytes = b"", reply_bytes: int = 0
) -> Script[bytes]:
    """Exchange proofs as the client; return what follows the server's proof.

    Args:
        challenge: the challenge after the HELLOs.
        refusal: raised if the server has another token.
        attachment: sent after the proof.
        reply_bytes: number of bytes that follow the server's proof.
    """
    try:
        challenge.receive_proof((yield challenge.proof() + attachment, PROOF_BYTES))
    except AuthenticationError:
        raise refusal from None
    return (yield b"", reply_bytes) if reply_bytes else b""


def verify_client(token: str, attachment_bytes: int = 0) -> Script[tuple[Challenge, bytes]]:
    """Check the client as the server, whose proof must follow; return what follows the client's proof."""
    challenge = Challenge(token, client=False)
    challenge.receive_hello((yield b"", HELLO_BYTES))
    message = yield challenge.hello(), PROOF_BYTES + attachment_bytes
    try:
        challenge.receive_proof(message[:PROOF_BYTES])
    except AuthenticationError:
        yield _REFUSAL, 0
        raise
    return challenge, message[PROOF_BYTES:]


def client_script(token: str, refusal: AuthenticationError) -> Script[bytes]:
    """Run the whole challenge as the client; return the connection's name."""
    challenge = yield from client_hello(token)
    yield from client_proof(challenge, refusal)
    return challenge.name


def server_script(token: str) -> Script[bytes]:
    """Run the whole challenge as the server; return the connection's name."""
    challenge, _ = yield from verify_client(token)
    yield challenge.proof(), 0
    return challenge.name
