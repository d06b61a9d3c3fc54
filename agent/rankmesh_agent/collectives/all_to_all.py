"""all_to_all: every rank ends with what each rank has for it. Every pair may have a length of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from struct import Struct

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.transports.windows import NOT_EXPOSED, PRIVATE, Exposure

_LENGTH = np.dtype(np.int64)
_EAGER = 1 << 13
"""Bytes for one rank that are sent along with the arrival; more go straight into its output."""
_LONG = 2 << 20
"""Bytes for one rank from which they are read where they lie; below, two copies in the cache are faster."""


def over_segment(segment: Segment, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Chunk by chunk: all write a lane of their slot for each rank, all read the lanes that are for them.

    With the first chunk all tell the lengths, which have to fit together, and where long arrays lie that can be read
    there: those take no lane.

    Steps: 1 a chunk of the longest array that takes a lane, at least 1, and 1 if any takes none. Each rank writes and
    reads its bytes once, or only reads them.
    """
    rank, size = segment.rank, segment.size
    dtype = inputs[0].dtype
    lane = segment.lane(dtype)
    sent, expected = [part.size for part in inputs], [part.size for part in outputs]
    if max(sent) > lane and any(np.may_share_memory(output, part) for output in outputs for part in inputs):
        inputs = [part.copy() for part in inputs]
    places = _places(segment, inputs)
    outgoing = [(to, inputs[to]) for to in range(size) if to != rank and places[2 * to] == NOT_EXPOSED]
    slots, notes, note = segment.slots(dtype, lane * size), segment.notes(), _note(size)
    note.pack_into(notes[rank], 0, *sent, *expected, *places)
    _write(slots[rank], outgoing, 0, lane)
    segment.step()
    shown: Exposure | None = None
    widest = sent[0]
    # Nearly always all lengths are the same, and nothing is long: then everyone has said the same.
    if len(outgoing) < size - 1 or sent != [widest] * size or expected != sent or notes != [notes[rank]] * size:
        table = [note.unpack_from(each) for each in notes]
        widest = _widest_in_lanes(table)
        shown = Exposure(segment, segment.windows, [row[2 * size :] for row in table])
    incoming = [
        (owner, output)
        for owner, output in enumerate(outputs)
        if owner != rank and (shown is None or not shown.has_from(owner))
    ]
    _read(slots, incoming, rank, 0, lane)
    for begin in range(lane, widest, lane):
        slots = segment.slots(dtype, lane * size)
        _write(slots[rank], outgoing, begin, lane)
        segment.step()
        _read(slots, incoming, rank, begin, lane)
    outputs[rank][:] = inputs[rank]
    if shown is not None and shown.any_exposed:
        for step in range(1, size):
            owner = (rank + step) % size  # not all at the same one at once
            if shown.has_from(owner):
                shown.read(owner, 0, outputs[owner])
        shown.complete()


@cache
def _note(size: int) -> Struct:
    """Return what a note holds: how long the array for each rank is, and that expected of each, and where each lies."""
    return Struct(f"={4 * size}q")


def _places(segment: Segment, inputs: Sequence[Array]) -> list[int]:
    """Return where the long arrays lie that the others can read there, as ``Windows.places``."""
    windows = segment.windows
    long = [part if part.nbytes >= _LONG and to != segment.rank else None for to, part in enumerate(inputs)]
    places = windows.locations(long if windows.usable else [None] * len(long))
    if not windows.can_read:
        for to in range(0, len(places), 2):
            if places[to] == PRIVATE:
                places[to : to + 2] = NOT_EXPOSED, 0
    return places


def _widest_in_lanes(table: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest array between any two ranks that takes a lane.

    Args:
        table: everyone's note, by rank.

    Raises:
        CallMismatchError: a rank has another length for a peer than that expects; everyone notices.
    """
    size = len(table)
    if [row[:size] for row in table] != list(zip(*(row[size : 2 * size] for row in table), strict=True)):
        raise CallMismatchError
    return max(
        row[to] if to != rank and row[2 * size + 2 * to] == NOT_EXPOSED else 0
        for rank, row in enumerate(table)
        for to in range(size)
    )


def _write(slot: Array, outgoing: Iterable[tuple[int, Array]], begin: int, lane: int) -> None:
    """Write the chunk of each array that begins at ``begin`` to the lane of the rank it is for."""
    for to, part in outgoing:
        piece = part[begin : begin + lane]
        slot[to * lane : to * lane + piece.size] = piece


def _read(slots: Sequence[Array], incoming: Iterable[tuple[int, Array]], rank: int, begin: int, lane: int) -> None:
    """Read the chunk of each array from the lane that is for this rank."""
    first = rank * lane
    for owner, output in incoming:
        wanted = output[begin : begin + lane]
        wanted[:] = slots[owner][first : first + wanted.size]


def over_link(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Everyone tells the lengths as it arrives, and sends short arrays along; long ones go straight to the outputs.

    Steps: 1, and 1 more if an array is long. Each rank sends and receives its bytes once, but what is for itself.
    """
    row = _lengths(inputs, outputs).tobytes()
    short = [part.nbytes <= _EAGER for part in inputs]
    arrived = link.all_exchange(
        each=[row + as_bytes(part) if fits else row for part, fits in zip(inputs, short, strict=True)]
    )
    _widest([np.frombuffer(payload[: len(row)], _LENGTH) for payload in arrived])
    for output, payload in zip(outputs, arrived, strict=True):
        if output.nbytes <= _EAGER:
            output[:] = np.frombuffer(payload[len(row) :], np.uint8).view(output.dtype)
    others = link.others()
    link.exchange(
        [(rank, as_bytes(inputs[rank])) for rank in others if not short[rank]],
        [(rank, as_bytes(outputs[rank])) for rank in others if outputs[rank].nbytes > _EAGER],
    )
    if not short[link.rank]:
        outputs[link.rank][:] = inputs[link.rank]


def _lengths(inputs: Sequence[Array], outputs: Sequence[Array]) -> npt.NDArray[np.int64]:
    return np.array([[part.size for part in inputs], [part.size for part in outputs]], _LENGTH).reshape(-1)


def _widest(rows: Sequence[npt.NDArray[np.int64]]) -> int:
    """Return the length of the longest array between any two ranks.

    Raises:
        CallMismatchError: a rank has another length for a peer than that expects; everyone notices.
    """
    table = np.array(rows).reshape(len(rows), 2, len(rows))
    if (table[:, 0] != table[:, 1].T).any():
        raise CallMismatchError
    return int(table.max())
