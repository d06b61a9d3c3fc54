"""The frames of the store's binary protocol. Pure: this module performs no I/O.

The protocol is at the store's HTTP port. After the handshake of ``wire.hello``, whose attachment is the id of the
store, the server names a unix socket there, in UNIX_NAME_BYTES, which takes half the time of TCP, for clients that can
connect to it. On either socket follow, one at a time, requests and their responses::

    request  offset  size  field
             0       1     opcode   the command
             1       1     flags    of the opcode, RETRY and KEYED
             2       2     zero
             4       4     seq      number of the request on this connection
             8       4     count    number of parts
             12      4     length   bytes that follow the header
             16      8     seconds  how long the command may wait (float64)

    response 0       1     kind     type of the result, see Kind
             1       3     zero
             4       4     seq      the request's
             8       4     count    number of parts
             12      4     length   bytes that follow the header
             16      8     number   the result, if it is a number (int64)

    both     24      4 x count      length of each part
             then                   the parts, one after the other: keys, values, names

All numbers are in network byte order. The receiver checks ``length`` against a limit before it allocates memory.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.wire.errors import ProtocolError

UNIX_NAME_BYTES = 64

_REQUEST, _RESPONSE = "!BBxxIIId", "!BxxxIIIq"
REQUEST, RESPONSE = struct.Struct(_REQUEST), struct.Struct(_RESPONSE)
_REQUEST_OF_ONE, _RESPONSE_OF_ONE = struct.Struct(_REQUEST + "I"), struct.Struct(_RESPONSE + "I")
_LENGTH = struct.Struct("!I")
HEADER_BYTES = REQUEST.size
MAX_BYTES = (2 * 64 + 1) << 20
"""Maximum bytes after a header: the maximum number of keys of maximum length, and the largest value."""
MAX_REQUEST_PARTS = (2 << 16) + 64
"""Maximum parts of a request: the maximum number of keys, each with a value, and some more; a part takes memory."""

STORE_ID_BYTES = 16
NO_STORE_ID = bytes(STORE_ID_BYTES)
"""Id of the store of a server that has only one."""
RETRY = 0x80
"""A flag: the client may have sent the request before, over a connection that broke; its first part is a RequestId."""
KEYED = 0x40
"""A flag, with RETRY: the identity is that of an Idempotency-Key."""
_REQUEST_ID = struct.Struct("!64sI")


class RequestId(NamedTuple):
    """Identity of a request that a client may repeat.

    Attributes:
        name: name of the connection that carried it first, or digest of its Idempotency-Key; after the id of the store
            at the server.
        number: of the request on that connection, or digest of the command.
        keyed: whether it is that of an Idempotency-Key.
    """

    name: bytes
    number: int
    keyed: bool = False

    def flags(self) -> int:
        """Return the flags of a request that has this identity."""
        return RETRY | KEYED if self.keyed else RETRY

    def encode(self) -> bytes:
        """Return the first part of the request."""
        return _REQUEST_ID.pack(self.name, self.number)


def decode_request_id(flags: int, parts: list[bytes]) -> RequestId | None:
    """Remove and return the identity of a request that its client may have sent before; None for other requests.

    Raises:
        ProtocolError: it is malformed.
    """
    if not flags & RETRY:
        return None
    try:
        name, number = _REQUEST_ID.unpack(parts.pop(0))
    except (IndexError, struct.error):
        raise ProtocolError("a retry in the store's binary protocol does not identify its request") from None
    return RequestId(name, number, bool(flags & KEYED))


class Kind(enum.IntEnum):
    """The type of a response's result."""

    NONE = 0
    BOOLEAN = 1
    """``number`` is 0 or 1."""
    NUMBER = 2
    VALUE = 3
    """One part."""
    VALUES = 4
    """Parts, in the order of the request's keys."""
    TEXTS = 5
    """Parts in UTF-8."""
    ERROR = 6
    """The error's code and message; a third part, if the error names ranks: its data, as JSON."""
    JOINED = 7
    """VALUES in one part, separated by zero bytes: none of them contains any."""
    EQUAL = 8
    """VALUES in one part, of ``number`` bytes each, at least one."""


Request = tuple[int, int, int, int, int, float]
"""A request's header, decoded: opcode, flags, seq, count, length, seconds."""
Response = tuple[int, int, int, int, int]
"""A response's header, decoded: kind, seq, count, length, number."""


def encode_unix_name(name: str) -> bytes:
    """Return the abstract name of a unix socket; of none if empty."""
    return name.encode("ascii").ljust(UNIX_NAME_BYTES, b"\0")


def decode_unix_name(data: bytes) -> str:
    """Return the name that ``encode_unix_name`` has encoded."""
    return data.rstrip(b"\0").decode("ascii", "replace")


def encode_request(opcode: int, flags: int, seq: int, seconds: float, parts: Sequence[bytes]) -> bytes:
    """Return a request as bytes."""
    if len(parts) == 1:  # the most frequent case
        size = len(parts[0])
        return _REQUEST_OF_ONE.pack(opcode, flags, seq, 1, 4 + size, seconds, size) + parts[0]
    lengths = [*map(len, parts)]
    count = len(lengths)
    header = _layout(_REQUEST, count).pack(opcode, flags, seq, count, 4 * count + sum(lengths), seconds, *lengths)
    return header + b"".join(parts)


def encode_response(kind: int, seq: int, number: int, parts: Sequence[bytes]) -> bytes:
    """Return a response as bytes."""
    if not parts:
        return RESPONSE.pack(kind, seq, 0, 0, number)
    if len(parts) == 1:
        size = len(parts[0])
        return _RESPONSE_OF_ONE.pack(kind, seq, 1, 4 + size, number, size) + parts[0]
    lengths = [*map(len, parts)]
    count = len(lengths)
    header = _layout(_RESPONSE, count).pack(kind, seq, count, 4 * count + sum(lengths), number, *lengths)
    return header + b"".join(parts)


def with_seq(response: bytes, seq: int) -> bytes:
    """Return a response as one to another request."""
    return response[:4] + seq.to_bytes(4, "big") + response[8:]


def decode_request(data: bytes | bytearray) -> Request:
    """Return the header that ``data`` begins with: opcode, flags, seq, count, length, seconds.

    Raises:
        ProtocolError: the header is not complete, the length exceeds the limit, or the time is invalid.
    """
    try:
        found: Request = REQUEST.unpack_from(data)
    except struct.error:
        raise _incomplete_error(data) from None
    _, _, _, count, length, seconds = found
    if length > MAX_BYTES or 4 * count > length or count > MAX_REQUEST_PARTS:
        raise _size_error(count, length)
    if not 0.0 <= seconds < math.inf:
        raise ProtocolError(f"a request of the store's binary protocol would wait {seconds} seconds")
    return found


def decode_response(data: bytes | bytearray) -> Response:
    """Return the header that ``data`` begins with: kind, seq, count, length, number.

    Raises:
        ProtocolError: the header is not complete, or the length exceeds the limit.
    """
    try:
        found: Response = RESPONSE.unpack_from(data)
    except struct.error:
        raise _incomplete_error(data) from None
    _, _, count, length, _ = found
    if length > MAX_BYTES or 4 * count > length:
        raise _size_error(count, length)
    return found


def decode_parts(frame: bytes | bytearray, count: int) -> list[bytes]:
    """Return the parts of a complete frame with ``count`` of them.

    Raises:
        ProtocolError: their lengths do not add up.
    """
    start = HEADER_BYTES + 4 * count
    if start > len(frame):
        raise _incomplete_error(frame)
    if count == 1 and _LENGTH.unpack_from(frame, HEADER_BYTES)[0] == len(frame) - start:
        return [bytes(memoryview(frame)[start:]) if isinstance(frame, bytearray) else frame[start:]]
    view = memoryview(frame) if isinstance(frame, bytearray) else frame  # large parts: one copy only
    parts = []
    for length in _layout("!", count).unpack_from(frame, HEADER_BYTES):
        parts.append(bytes(view[start : start + length]))
        start += length
    if start != len(frame):
        raise ProtocolError("the parts of a frame of the store's binary protocol do not add up to its length")
    return parts


@functools.lru_cache(32)
def _layout(header: str, count: int) -> struct.Struct:
    """Return the layout of a header and the lengths of ``count`` parts."""
    return struct.Struct(f"{header}{count}I")


def _incomplete_error(data: bytes | bytearray) -> ProtocolError:
    return ProtocolError(f"{len(data)} bytes are no frame of the store's binary protocol")


def _size_error(count: int, length: int) -> ProtocolError:
    return ProtocolError(
        f"a frame of the store's binary protocol would have {count} parts and {length} bytes; at most {MAX_BYTES} "
        f"bytes, and in a request {MAX_REQUEST_PARTS} parts, are allowed"
    )
