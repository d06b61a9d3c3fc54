"""Reports of the ranks' latest calls, which no rank waits for: each rank sends its own, or of many ranks all it has.

In a large group a report goes to the neighbours in the overlay, as a table of all reports that its sender has; a rank
that receives others passes them on.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from rankmesh_agent.progress import descriptions

_NUMBERS = Struct("!QQ")


class CallProgress(NamedTuple):
    """The latest call that a rank has reported: its number, its fingerprint, and a description."""

    seq: int
    fingerprint: int
    description: str


def encode(reports: dict[int, CallProgress], size: int) -> bytes:
    """Return reports, by group rank, as bytes."""
    table: descriptions.Table = {}
    for rank, (seq, fingerprint, description) in reports.items():
        text = _NUMBERS.pack(seq, fingerprint) + description.encode()
        table[text] = table.get(text, 0) | 1 << rank
    return descriptions.encode(table, size)


def merge(reports: dict[int, CallProgress], payload: bytes, size: int) -> bool:
    """Add the later ones of other reports; return whether there are any."""
    table: descriptions.Table = {}
    descriptions.merge(table, payload, size)
    changed = False
    for text, ranks in table.items():
        if len(text) < _NUMBERS.size:
            continue
        # One object for all ranks that have it, however many a short table names.
        seq, fingerprint = _NUMBERS.unpack_from(text)
        report = CallProgress(seq, fingerprint, text[_NUMBERS.size :].decode(errors="replace"))
        for rank in range(size):
            if ranks >> rank & 1 and (rank not in reports or reports[rank].seq < seq):
                reports[rank] = report
                changed = True
    return changed
