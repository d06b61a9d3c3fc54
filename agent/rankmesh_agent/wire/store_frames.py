"""The frames of the store's binary protocol. Pure: this module performs no I/O.

The protocol is at the store's HTTP port. After the handshake of ``wire.hello``, whose attachment is the id of the
store, the server names a unix socket there, in UNIX_NAME_BYTES, which takes half the time of TCP, for clients that can
connect to it. On either socket follow, one at a time, requests and their responses::

    offset  size    field
    0       4       length   bytes of the body
    4       4       seq      number of the request on this connection
    8       length  body     MessagePack, see ``store.codec``

The numbers are in network byte order. The receiver checks ``length`` against a limit before it allocates memory.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

from msgspec import Meta

from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.hello import NAME_BYTES

UNIX_NAME_BYTES = 64
HEADER = struct.Struct("!II")
HEADER_BYTES = HEADER.size
MAX_BYTES = (2 * 64 + 1) << 20
"""Maximum bytes of a body: the maximum number of keys of maximum length, and the largest value."""
Frame = bytes | bytearray
STORE_ID_BYTES = 16
NO_STORE_ID = bytes(STORE_ID_BYTES)
"""Id of the store of a server that has only one."""


class RequestId(NamedTuple):
    """Identity of a request that a client may repeat.

    Attributes:
        name: name of the connection that carried it first, or digest of its Idempotency-Key.
        number: of the request on that connection, or digest of the command.
        keyed: whether it is that of an Idempotency-Key.
    """

    name: Annotated[bytes, Meta(max_length=NAME_BYTES)]
    number: Annotated[int, Meta(ge=0, lt=1 << 32)]
    keyed: bool = False


def encode_unix_name(name: str) -> bytes:
    """Return the abstract name of a unix socket; of none if empty."""
    return name.encode("ascii").ljust(UNIX_NAME_BYTES, b"\0")


def decode_unix_name(data: bytes) -> str:
    """Return the name that ``encode_unix_name`` has encoded."""
    return data.rstrip(b"\0").decode("ascii", "replace")


def with_seq(frame: Frame, seq: int) -> bytes:
    """Return a response as one to another request."""
    return b"".join((frame[:4], seq.to_bytes(4, "big"), frame[HEADER_BYTES:]))


def decode_header(data: Frame) -> tuple[int, int]:
    """Return the length and seq of the frame that ``data`` begins with."""
    try:
        length, seq = HEADER.unpack_from(data)
    except struct.error:
        raise ProtocolError(f"{len(data)} bytes are no frame of the store's binary protocol") from None
    if length > MAX_BYTES:
        raise ProtocolError(
            f"a frame of the store's binary protocol would have {length} bytes; at most {MAX_BYTES} are allowed"
        )
    return length, seq
