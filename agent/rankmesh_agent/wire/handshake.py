"""The mutual challenge at the start of every fast-path connection, before any frame. Pure: this module performs no I/O.

::

    client → server   HELLO   magic, version, client nonce                       40 bytes
    server → client   HELLO   magic, version, server nonce                       40 bytes
    client → server   PROOF   HMAC(token, "client", both nonces)                 32 bytes
    server → client   PROOF   HMAC(token, "server", both nonces)                 32 bytes

Each side proves that it knows the token without sending it. Fresh nonces make the replay of a recorded handshake
useless, and the role in the proof prevents reflection. The client sends its proof first, so a port scan reveals
nothing. All messages have a fixed size: no data of an unauthenticated peer determines the number of bytes read.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.frames import VERSION

MAGIC = b"RKMH-HI"
_HELLO = struct.Struct("!7sB32s")
HELLO_BYTES = _HELLO.size
PROOF_BYTES = 32


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
