"""all_to_all: every rank receives one array from each rank. Each pair of ranks may have its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from struct import Struct

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Link, as_bytes
from rankmesh_agent.collectives.rounds import allreduce_bytes, transpose
from rankmesh_agent.shared_memory.segment import NOT_EXPOSED, PRIVATE, Exposure, Segment
from rankmesh_agent.shared_memory.slots import CallMismatchError

_LENGTH = np.dtype(np.int64)
_EAGER = 1 << 13
"""Maximum bytes for one rank that are sent with the arrival message; larger arrays go directly into its output."""
_ROW = 1 << 16
"""Maximum bytes for one rank that many ranks pass on by Bruck's algorithm, in log2 size steps with half of all bytes
each. Calculated, not measured: where a message takes 80 us, and a byte 0.35 ns, 45 to 130 kB for 13 to 4096 ranks."""
_LONG = 1 << 20
"""Minimum bytes for one rank that it reads from the sender's memory; below, two copies in the cache are faster."""
_LONG_READS = 4 << 20
"""The same, times the number of ranks, of an array that is not registered: the kernel copies it page by page."""


def over_segment(segment: Segment, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """In chunks, each rank writes one lane of its slot for every rank and reads the lanes written for it.

    With the first chunk, every rank publishes the lengths, which must match, and the addresses of long arrays that the
    other ranks can read directly: those take no lane.

    Steps: 1 a chunk of the longest array that takes a lane, at least 1, and 1 if any takes none. Each rank writes and
    reads its bytes once, or only reads them.
    """
    rank, size = segment.rank, segment.size
    dtype = inputs[0].dtype
    lane = segment.lane(dtype)
    sent, expected = [part.size for part in inputs], [part.size for part in outputs]
    if max(sent) > lane and any(np.may_share_memory(output, part) for output in outputs for part in inputs):
        inputs = [part.copy() for part in inputs]
    locations = _locations(segment, inputs)
    outgoing = [(to, inputs[to]) for to in range(size) if to != rank and locations[2 * to] == NOT_EXPOSED]
    slots, notes, note = segment.slots(dtype, lane * size), segment.notes(), _note(size)
    note.pack_into(notes[rank], 0, *sent, *expected, *locations)
    _write(slots[rank], outgoing, 0, lane)
    segment.step()
    longest, exposure = sent[0], None
    # Fast path: all lengths are equal and no array is long, so all notes are equal.
    if len(outgoing) < size - 1 or sent != [longest] * size or expected != sent or notes != [notes[rank]] * size:
        longest, exposure = segment.decoded(_decode, notes)
    _exchange(segment, (outputs, inputs, outgoing), slots, longest, exposure)


def complete(segment: Segment, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Carry out over_segment after its step with arrays that fit into lanes, where those of other ranks may not."""
    dtype = inputs[0].dtype
    longest, exposure = segment.decoded(_decode, segment.notes())
    slots = segment.current_slots(dtype, segment.lane(dtype) * segment.size)
    outgoing = [(to, part) for to, part in enumerate(inputs) if to != segment.rank]
    _exchange(segment, (outputs, inputs, outgoing), slots, longest, exposure)


def _exchange(
    segment: Segment,
    arrays: tuple[Sequence[Array], Sequence[Array], Sequence[tuple[int, Array]]],
    slots: Sequence[Array],
    longest: int,
    exposure: Exposure | None,
) -> None:
    """Read the first chunk, exchange the others, and read the exposed arrays."""
    outputs, inputs, outgoing = arrays
    rank, size = segment.rank, segment.size
    dtype = inputs[0].dtype
    lane = segment.lane(dtype)
    incoming = [
        (owner, output)
        for owner, output in enumerate(outputs)
        if owner != rank and (exposure is None or not exposure.has_from(owner))
    ]
    _read(slots, incoming, rank, 0, lane)
    for begin in range(lane, longest, lane):
        slots = segment.slots(dtype, lane * size)
        _write(slots[rank], outgoing, begin, lane)
        segment.step()
        _read(slots, incoming, rank, begin, lane)
    outputs[rank][:] = inputs[rank]
    if exposure is not None and exposure.any_exposed:
        for step in range(1, size):
            owner = (rank + step) % size  # each rank starts at another one
            if exposure.has_from(owner):
                segment.read(exposure, owner, 0, outputs[owner])
        segment.complete(exposure)


def splits(outputs: Sequence[Array], inputs: Sequence[Array]) -> Callable[[], str]:
    """Return a function that describes the number of elements for each rank, which no other rank knows beforehand."""
    return lambda: (
        f"sends {[part.size for part in inputs]} elements to the ranks and expects {[part.size for part in outputs]}"
    )


@cache
def _note(size: int) -> Struct:
    """Return the layout of a note: lengths of the arrays to and from each rank, and locations of the arrays to each."""
    return Struct(f"={4 * size}q")


def _locations(segment: Segment, inputs: Sequence[Array]) -> list[int]:
    """Return the locations of the long arrays that the other ranks can read directly, as ``Segment.locations`` does."""
    long = [part if part.nbytes >= _LONG and to != segment.rank else None for to, part in enumerate(inputs)]
    locations = segment.locations(long if segment.usable else [None] * len(long))
    for to, part in enumerate(inputs):
        reads = segment.can_read and part.nbytes * segment.size >= _LONG_READS
        if not reads and locations[2 * to] == PRIVATE:
            locations[2 * to : 2 * to + 2] = NOT_EXPOSED, 0
    return locations


def _decode(rank: int, notes: Sequence[memoryview]) -> tuple[int, Exposure]:
    """Return the length of the longest array between any two ranks that takes a lane, and the arrays that take none."""
    size = len(notes)
    rows = [_note(size).unpack_from(note) for note in notes]
    if [row[:size] for row in rows] != list(zip(*(row[size : 2 * size] for row in rows), strict=True)):
        raise CallMismatchError  # at every rank
    longest = max(
        row[to] if to != owner and row[2 * size + 2 * to] == NOT_EXPOSED else 0
        for owner, row in enumerate(rows)
        for to in range(size)
    )
    return longest, Exposure.of(rank, [row[2 * size :] for row in rows])


def _write(slot: Array, outgoing: Iterable[tuple[int, Array]], begin: int, lane: int) -> None:
    """Write the chunk of each array that begins at ``begin`` to the lane of its destination."""
    for to, part in outgoing:
        piece = part[begin : begin + lane]
        slot[to * lane : to * lane + piece.size] = piece


def _read(slots: Sequence[Array], incoming: Iterable[tuple[int, Array]], rank: int, begin: int, lane: int) -> None:
    """Read the chunk of each array from the lane of this rank."""
    first = rank * lane
    for owner, output in incoming:
        wanted = output[begin : begin + lane]
        wanted[:] = slots[owner][first : first + wanted.size]


def over_link(link: DirectLink, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Each rank sends the lengths and its short arrays with its arrival messages, long arrays directly to the outputs.

    Steps: 1, and 1 more if an array is long. Each rank sends and receives its bytes once, except its array for itself.

    Raises:
        CallMismatchError: two ranks expect different lengths of the array between them.
    """
    row = np.array([[part.size for part in parts] for parts in (inputs, outputs)], _LENGTH).tobytes()
    short = [part.nbytes <= _EAGER for part in inputs]
    arrived = link.all_exchange(
        each=[row + as_bytes(part) if fits else row for part, fits in zip(inputs, short, strict=True)]
    )
    lengths = np.array([np.frombuffer(payload[: len(row)], _LENGTH) for payload in arrived])
    sent, expected = lengths.reshape(link.size, 2, link.size).swapaxes(0, 1)
    if (sent != expected.T).any():
        raise CallMismatchError  # every rank raises it
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


def bruck_link(link: Link, outputs: Sequence[Array], inputs: Sequence[Array]) -> None:
    """Each rank learns the lengths of the arrays for it, then all learn the longest, and then the arrays move.

    Short arrays move as rows of the longest one's length by Bruck's algorithm, others directly to the outputs.

    Steps: 3 log2 size, or 1 in place of the last log2 size. Each rank sends half the arrays' bytes in each of those, or
    its bytes once; and 8 bytes for each rank before.

    Raises:
        CallMismatchError: two ranks expect different lengths of the array between them.
    """
    sent, expected = (np.array([part.size for part in parts], _LENGTH) for parts in (inputs, outputs))
    lengths = transpose(link, sent.view(np.uint8).reshape(link.size, -1))
    if lengths.tobytes() != expected.tobytes():
        raise CallMismatchError  # every rank raises it, since no other one ends the next step
    longest = allreduce_bytes(
        link, b"%d" % sent.max(), lambda lower, upper: max(lower, upper, key=lambda each: int(bytes(each)))
    )
    width = int(bytes(longest)) * inputs[0].itemsize
    if width <= _ROW:
        rows = np.zeros((link.size, width), np.uint8)
        for row, part in zip(rows, inputs, strict=True):
            row[: part.nbytes] = part.view(np.uint8)
        for row, output in zip(transpose(link, rows), outputs, strict=True):
            output[:] = row[: output.nbytes].view(output.dtype)
        return
    others = link.others()
    link.exchange(
        [(rank, as_bytes(inputs[rank])) for rank in others], [(rank, as_bytes(outputs[rank])) for rank in others]
    )
    outputs[link.rank][:] = inputs[link.rank]
