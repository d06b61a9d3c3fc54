"""all_to_all: every rank ends with what each rank has for it. Every pair may have a length of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Array, Link, octets
from rankmesh_agent.transports.segment import DisagreementError, Segment

_OCTET = np.dtype(np.uint8)
_LENGTH = np.dtype(np.int64)
_EAGER = 1 << 13
"""Bytes for one rank that are sent along with the arrival; more go straight into its output."""
_LONG = 1 << 20
"""Bytes for one rank, beyond the first chunk, from which they are read where they lie."""


def over_segment(segment: Segment, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """All tell the lengths, which have to fit together, with the beginning of each array; the rest follows.

    It is read where it lies, if it is long and they can; else chunk by chunk: all write a lane of their slot for each
    rank, all read the lanes that are for them.

    Steps: 1, then 2, or 1 a chunk of the longest array of all. Each rank writes and reads its bytes once, or only reads
    them.
    """
    size = segment.size
    row = _lengths(inputs, outputs)
    dtype = inputs[0].dtype
    head = -(-row.nbytes // 64) * 64
    lane = segment.lane(dtype, head)
    first = slice(0, lane)
    raw = _write(segment, inputs, first, row, head)
    widest = _widest([slot[: row.nbytes].view(_LENGTH) for slot in raw])
    if widest > first.stop and any(np.may_share_memory(output, part) for output in outputs for part in inputs):
        inputs = [part.copy() for part in inputs]
    _read(segment, outputs, raw, first, head)
    rest = first.stop
    if (widest - rest) * dtype.itemsize >= _LONG and segment.windows.usable:
        shown = segment.windows.show([part[rest:] for part in inputs])
        if shown.readable:
            for step in range(1, size):
                owner = (segment.rank + step) % size  # not all at the same one at once
                shown.read(owner, 0, outputs[owner][rest:])
            shown.done()
            rest = widest
    for begin in range(rest, widest, lane):
        chunk = slice(begin, begin + lane)
        _read(segment, outputs, _write(segment, inputs, chunk, row[:0], head), chunk, head)
    outputs[segment.rank][:] = inputs[segment.rank]


def _write(
    segment: Segment, inputs: Sequence[Array], chunk: slice, row: npt.NDArray[np.int64], head: int
) -> list[Array]:
    """Write ``row``, and behind ``head`` bytes a lane with the chunk of each other rank's array; return all slots."""
    dtype = inputs[0].dtype
    lane = chunk.stop - chunk.start
    raw = segment.slots(_OCTET, head + lane * segment.size * dtype.itemsize)
    mine = raw[segment.rank]
    mine[: row.nbytes] = row.view(_OCTET)
    lanes = mine[head:].view(dtype)
    for owner, part in enumerate(inputs):
        if owner != segment.rank:
            piece = part[chunk]
            lanes[owner * lane : owner * lane + piece.size] = piece
    segment.step()
    return raw


def _read(segment: Segment, outputs: Sequence[Array], raw: Sequence[Array], chunk: slice, head: int) -> None:
    """Read the lanes that are for this rank."""
    rank = segment.rank
    begin = rank * (chunk.stop - chunk.start)
    for owner, output in enumerate(outputs):
        wanted = output[chunk]
        if owner != rank and wanted.size:
            wanted[:] = raw[owner][head:].view(output.dtype)[begin : begin + wanted.size]


def over_link(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Everyone tells the lengths as it arrives, and sends short arrays along; long ones go straight to the outputs.

    Steps: 1, and 1 more if an array is long. Each rank sends and receives its bytes once, but what is for itself.
    """
    row = _lengths(inputs, outputs).tobytes()
    short = [part.nbytes <= _EAGER for part in inputs]
    arrived = link.enter(each=[row + octets(part) if fits else row for part, fits in zip(inputs, short, strict=True)])
    _widest([np.frombuffer(payload[: len(row)], _LENGTH) for payload in arrived])
    for output, payload in zip(outputs, arrived, strict=True):
        if output.nbytes <= _EAGER:
            output[:] = np.frombuffer(payload[len(row) :], np.uint8).view(output.dtype)
    others = link.others()
    link.exchange(
        [(rank, octets(inputs[rank])) for rank in others if not short[rank]],
        [(rank, octets(outputs[rank])) for rank in others if outputs[rank].nbytes > _EAGER],
    )
    if not short[link.rank]:
        outputs[link.rank][:] = inputs[link.rank]


def _lengths(inputs: Sequence[Array], outputs: Sequence[Array]) -> npt.NDArray[np.int64]:
    return np.array([[part.size for part in inputs], [part.size for part in outputs]], _LENGTH).reshape(-1)


def _widest(rows: Sequence[npt.NDArray[np.int64]]) -> int:
    """Return the length of the longest array between any two ranks.

    Raises:
        DisagreementError: a rank has another length for a peer than that expects; everyone notices.
    """
    table = np.array(rows).reshape(len(rows), 2, len(rows))
    if (table[:, 0] != table[:, 1].T).any():
        raise DisagreementError
    return int(table.max())
