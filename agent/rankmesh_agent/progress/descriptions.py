"""Tables of the ranks' descriptions of their calls after a mismatch, which travel among many ranks: equal ones once."""

from __future__ import annotations

import struct
from struct import Struct

from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import ProtocolError

_LENGTH = Struct("!I")

Table = dict[bytes, int]
"""Each description with the ranks that have it, as bits."""


def encode(table: Table, size: int) -> bytes:
    """Return a table as bytes, at most frames.SMALL: of those of the fewest ranks, as many as fit."""
    mask_bytes = -(-size // 8)
    encoded = b""
    for text, ranks in sorted(table.items(), key=lambda item: item[1].bit_count()):
        entry = _LENGTH.pack(len(text)) + text + ranks.to_bytes(mask_bytes, "little")
        if len(encoded) + len(entry) <= frames.SMALL:
            encoded += entry
    return encoded


def merge(table: Table, payload: bytes, size: int) -> None:
    """Add a table as ``encode`` returns it.

    Raises:
        ProtocolError: it is none.
    """
    mask_bytes, begin = -(-size // 8), 0
    while begin < len(payload):
        try:
            (length,) = _LENGTH.unpack_from(payload, begin)
        except struct.error:
            raise ProtocolError("a table of calls ends within an entry") from None
        begin += _LENGTH.size
        text, mask = payload[begin : begin + length], payload[begin + length : begin + length + mask_bytes]
        table[text] = table.get(text, 0) | int.from_bytes(mask, "little")
        begin += length + mask_bytes


def by_rank(table: Table, size: int) -> list[memoryview | bytes]:
    """Return the description of each rank, empty for those that are not in the table."""
    found: list[memoryview | bytes] = [b""] * size
    for text, ranks in table.items():
        for rank in range(size):
            if ranks >> rank & 1:
                found[rank] = text
    return found
