"""The frame header of the fast path: 64 bytes before every payload. Pure: this module performs no I/O.

::

    offset  size  field
    0       4     magic        b"RKMH"
    4       1     version      1
    5       1     opcode       type of the frame, see Opcode
    6       2     dtype        element type of the payload (wire.dtypes), 0 for none
    8       8     group        id of the group
    16      4     epoch        epoch of the job
    20      4     part         round of an ENTER; generation of an RTS whose receiver may read the data itself; GROUP
                               of an ABORT by which its sender leaves the group (wire.goodbye)
    24      8     seq          the operation's sequence number in its group; id of a point-to-point message
    32      8     tag          point-to-point tag (signed); of a GOODBYE about another rank, that rank + 1
    40      8     length       bytes of payload that follow
    48      8     fingerprint  of the call (wire.ops.Call); of an RTS, the address of the data in the sender, or 0
    56      8     total        bytes of the whole message an RTS announces or a CREDIT returns

All numbers are in network byte order. The receiver checks sizes against a limit before it allocates memory: ``length``
may exceed SMALL only where a receiver has posted a buffer of exactly that size.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.version import PROTOCOL_VERSION

MAGIC = b"RKMH"
HEADER = struct.Struct("!4sBBHQIIQqQQQ")
HEADER_BYTES = HEADER.size
SMALL = 1 << 16
"""Maximum payload, in bytes, of a frame without a posted buffer (eager messages have their own limit)."""


class Opcode(enum.IntEnum):
    """Type of a frame."""

    ENTER = 1
    """A rank has arrived at a collective; the payload is a small contribution."""
    PART = 2
    """A piece of a collective's data, for a buffer that the receiver posts."""
    EAGER = 3
    """A whole point-to-point message, sent before its receive."""
    RTS = 4
    """Request to send: announces a point-to-point message of ``total`` bytes."""
    CTS = 5
    """Clear to send: the receiver has posted a buffer for message ``seq``."""
    BULK = 6
    """The data of a message after its CTS."""
    CREDIT = 7
    """The receiver has removed ``total`` bytes of eager messages from its queue."""
    REFUSE = 8
    """The receiver rejects message ``seq``; the payload is the reason."""
    ABORT = 9
    """The sender aborts the group, the payload is the error as JSON; or it leaves the group (wire.goodbye)."""
    GOODBYE = 10
    """The sender leaves and will close the connection; with a tag: rank ``tag - 1`` has left, or failed."""
    WITHDRAW = 11
    """The sender no longer waits for the CTS of message ``seq``, which it announced."""
    DONE = 12
    """The receiver has read message ``seq`` from the sender's memory."""


_new_tuple = tuple.__new__
_OPCODES: dict[int, Opcode] = {int(opcode): opcode for opcode in Opcode}
POSTED = frozenset({Opcode.PART, Opcode.BULK})
"""Frames whose payload goes into a buffer that the receiver has posted."""


class Header(NamedTuple):
    """A decoded frame header."""

    opcode: Opcode
    dtype: int = dtypes.NONE
    group: int = 0
    epoch: int = 0
    part: int = 0
    seq: int = 0
    tag: int = 0
    length: int = 0
    fingerprint: int = 0
    total: int = 0


def encode(
    opcode: Opcode,
    dtype: int = dtypes.NONE,
    group: int = 0,
    epoch: int = 0,
    part: int = 0,
    seq: int = 0,
    tag: int = 0,
    length: int = 0,
    fingerprint: int = 0,
    total: int = 0,
) -> bytes:
    """Return the 64 bytes of a header."""
    return HEADER.pack(
        MAGIC, PROTOCOL_VERSION, opcode, dtype, group, epoch, part, seq, tag, length, fingerprint, total
    )  # fmt: skip


def decode(data: bytes | bytearray | memoryview, offset: int = 0, eager_limit: int = SMALL) -> Header:
    """Return the header at ``offset`` of data with at least 64 bytes from there.

    Raises:
        ProtocolError: another magic or version, an unknown opcode or dtype, or a length over the limit.
    """
    magic, version, number, dtype, group, epoch, part, seq, tag, length, fingerprint, total = HEADER.unpack_from(
        data, offset
    )
    if magic != MAGIC:
        raise ProtocolError(f"expected a frame, got bytes that begin with {magic!r}; is this a RankMesh port?")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: upgrade the older one"
        )
    opcode = _OPCODES.get(number)
    if opcode is None:
        raise ProtocolError(f"unknown opcode {number} in a frame")
    if dtype and dtype not in dtypes.FROM_CODE:
        raise ProtocolError(f"unknown dtype code {dtype} in a frame")
    if opcode not in POSTED and length > (eager_limit if opcode is Opcode.EAGER else SMALL):
        raise ProtocolError(f"a {opcode.name} frame of {length} bytes is over the limit")
    # As Header(...) does, without the call of the function that NamedTuple generates: every frame comes here.
    return _new_tuple(Header, (opcode, dtype, group, epoch, part, seq, tag, length, fingerprint, total))
