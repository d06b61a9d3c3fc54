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


def over_segment(segment: Segment, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Chunk by chunk: all write a lane of their slot for each rank; all read the lanes that are for them.

    The first chunk comes with the lengths, which have to fit together.

    Steps: 1 a chunk of the longest array of all, at least 1. Each rank writes and reads its bytes once.
    """
    rank, size = segment.rank, segment.size
    dtype = inputs[0].dtype
    row = _lengths(inputs, outputs)
    head = -(-row.nbytes // 64) * 64
    lane = segment.lane(dtype, head)
    tail = head + lane * size * dtype.itemsize
    begin, widest = 0, 1
    while begin < widest:
        raw = segment.slots(_OCTET, tail)
        lanes = raw[rank][head:].view(dtype)
        for owner, part in enumerate(inputs):
            piece = part[begin : begin + lane]
            lanes[owner * lane : owner * lane + piece.size] = piece
        if begin == 0:
            raw[rank][: row.nbytes] = row.view(_OCTET)
        segment.step()
        if begin == 0:
            widest = _widest([slot[: row.nbytes].view(_LENGTH) for slot in raw])
        for owner, output in enumerate(outputs):
            wanted = output[begin : begin + lane]
            if wanted.size:
                wanted[:] = raw[owner][head:].view(dtype)[rank * lane : rank * lane + wanted.size]
        begin += lane


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
