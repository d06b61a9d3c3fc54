"""reduce_scatter: every rank ends with the reduction of one of the arrays that each rank has for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rankmesh_agent.collectives.link import CHUNK_BYTES, Array, Exchange, Link, as_bytes, chunks, pipelined, shards
from rankmesh_agent.collectives.reduction import CACHE_BYTES, combine, combine_in_place
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.windows import Exposure
from rankmesh_agent.wire.ops import ReduceOp

MAX_UNFINISHED = 2
"""Pieces that may still be on their way to the others when the next one is reduced."""


def over_segment(segment: Segment, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Chunk by chunk: all write a lane of their slot for each other rank, which reduces the lanes that are for it.

    Steps: 1 a chunk of the longest output, at least 1. Each rank writes and reads (size - 1) / size of its bytes.
    """
    rank = segment.rank
    lane = segment.lane(output.dtype)
    widest = max(part.size for part in inputs)
    for begin in range(0, widest or 1, lane):
        slots = segment.slots(output.dtype, lane * segment.size)
        mine = slots[rank]
        for owner, part in enumerate(inputs):
            if owner != rank:
                piece = part[begin : begin + lane]
                mine[owner * lane : owner * lane + piece.size] = piece
        segment.step()
        wanted = output[begin : begin + lane]
        lanes = slice(rank * lane, rank * lane + wanted.size)
        parts = [slot[lanes] for slot in slots]
        parts[rank] = inputs[rank][begin : begin + lane]
        combine_in_place(op, parts, rank, wanted)


def direct_segment(segment: Segment, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Each rank reduces what is for it where it lies, or piece by piece as it reads it.

    Steps: 2. Each rank reads (size - 1) / size of its bytes. If they cannot, 1 step more than over_segment.
    """
    rank, size = segment.rank, segment.size
    if any(np.may_share_memory(output, part) for part in inputs):
        inputs = [part.copy() for part in inputs]
    shown = segment.windows.expose(inputs)
    if not shown.readable:
        over_segment(segment, output, inputs, op)
        return
    mapped = [shown.view(owner, output) for owner in range(size)] if shown.mapped else []
    room = CACHE_BYTES // output.itemsize
    for piece in chunks(output.size, room):
        wanted = output[piece]
        if mapped:
            parts = [theirs[piece] for theirs in mapped]
        else:
            scratch = segment.scratch(output.dtype, size * room)
            parts = [scratch[owner * room : owner * room + wanted.size] for owner in range(size)]
            parts[rank] = inputs[rank][piece]
            for owner in range(size):
                if owner != rank:
                    shown.read(owner, piece.start, parts[owner])
        combine(op, parts, wanted)
    shown.complete()


def write_other_shards(segment: Segment, slots: Sequence[Array], part: Array, mine: slice) -> list[Array]:
    """Write the others' shares of an array to this rank's slot; return everyone's part of this rank's share, by rank.

    Ends a step. The result had better go to memory of this rank's own first, and to a slot by a copy: adding up into
    memory that another core has read took half as long again, for 1 MiB and 2 ranks.
    """
    rank = segment.rank
    slots[rank][: mine.start] = part[: mine.start]
    slots[rank][mine.stop :] = part[mine.stop :]
    segment.step()
    return [part[mine] if owner == rank else slot[mine] for owner, slot in enumerate(slots)]


def reduce_exposed(
    segment: Segment, shown: Exposure, array: Array, op: ReduceOp
) -> Iterator[tuple[Sequence[Array], Array]]:
    """Reduce this rank's share of everyone's registered arrays; yield piece by piece where it lies, and the result.

    The result is in memory that the next piece takes: it is the caller's to write it where it belongs.
    """
    everyone = [shown.view(owner, array) for owner in range(segment.size)]
    mine = shards(array.size, segment.size)[segment.rank]
    for piece in chunks(mine.stop - mine.start, CACHE_BYTES // array.itemsize):
        parts = [theirs[mine][piece] for theirs in everyone]
        reduced = segment.scratch(array.dtype, parts[0].size)
        combine(op, parts, reduced)
        yield parts, reduced


def small_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Everyone sends each rank what is for it along as it arrives.

    Steps: 1. Each rank sends (size - 1) / size of its bytes. At most frames.SMALL bytes a rank.
    """
    arrived = link.all_exchange(each=[as_bytes(part) for part in inputs])
    parts = [np.frombuffer(payload, np.uint8).view(output.dtype) for payload in arrived]
    combine_in_place(op, parts, link.rank, output)


def direct_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Everyone sends each rank what is for it; that is reduced piece by piece, in the cache.

    Steps: 1 a piece. Each rank sends (size - 1) / size of its bytes and receives (size - 1) times its output.
    """
    link.all_exchange()
    for _ in reduce_chunks(link, output, inputs, op):
        pass


def reduce_chunks(
    link: Link, output: Array | None, inputs: Sequence[Array], op: ReduceOp
) -> Iterator[tuple[slice, Array]]:
    """Exchange and reduce, after the arrival; yield each piece of the inputs, and what this rank has reduced of it.

    The next piece is on its way while this one is reduced and used. Ranks whose input is shorter yield empty arrays.

    Args:
        link: the ranks.
        output: where the result goes, may be this rank's own one of ``inputs``; None for memory that holds a piece
            until the next but one is yielded.
        inputs: what each rank is to reduce.
        op: how.
    """
    rank, size = link.rank, link.size
    mine = inputs[rank]
    piece = max(1, CHUNK_BYTES // mine.itemsize)
    room = min(piece, mine.size)
    rows = link.scratch(2 * size * room * mine.itemsize).view(mine.dtype).reshape(2, size, room)
    others = link.others()

    def start(number: int) -> Exchange:
        part = slice(number * piece, (number + 1) * piece)
        count = mine[part].size
        sends = [(other, as_bytes(inputs[other][part])) for other in others]
        return link.start(sends, [(other, as_bytes(rows[number % 2, other, :count])) for other in others])

    for number in pipelined(link, -(-max(part.size for part in inputs) // piece), start):
        part = slice(number * piece, (number + 1) * piece)
        own = mine[part]
        parts = [own if other == rank else rows[number % 2, other, : own.size] for other in range(size)]
        reduced = rows[number % 2, rank, : own.size] if output is None else output[part]
        if rank > 1 and np.may_share_memory(own, reduced):
            combine(op, parts, parts[0])
            reduced[:] = parts[0]
        else:
            combine(op, parts, reduced)
        yield part, reduced
