"""reduce_scatter: each rank receives the reduction of the arrays that all ranks contribute for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Exchange, Link, as_bytes, chunks, pipelined, shards
from rankmesh_agent.collectives.reduction import (
    CACHE_BYTES,
    combine,
    combine_in_place,
    combine_partials,
    combine_to_partial,
    partial_dtype,
)
from rankmesh_agent.collectives.rounds import reduce_by_doubling
from rankmesh_agent.shared_memory.process_vm import address_of
from rankmesh_agent.shared_memory.segment import Exposure, Segment
from rankmesh_agent.wire.ops import ReduceOp

MAX_UNFINISHED = 2
"""Maximum number of reduced pieces in transit while the next piece is reduced."""


def over_segment(segment: Segment, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """In chunks, each rank writes one lane of its slot for every other rank and reduces the lanes written for it.

    Steps: 1 a chunk of the longest output, at least 1. Each rank writes and reads (size - 1) / size of its bytes.
    """
    rank = segment.rank
    lane = segment.lane(output.dtype)
    longest = max(part.size for part in inputs)
    for begin in range(0, longest or 1, lane):
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
    """Each rank reduces its inputs in the memory of the other ranks, or in pieces as it reads them.

    Steps: 2. Each rank reads (size - 1) / size of its bytes. If they cannot, 1 step more than over_segment.
    """
    rank, size = segment.rank, segment.size
    in_place = address_of(output) == address_of(inputs[rank])  # which no other rank reads
    inputs = [
        part if (owner == rank and in_place) or not np.may_share_memory(output, part) else part.copy()
        for owner, part in enumerate(inputs)
    ]
    exposure = segment.expose(inputs)
    if not segment.is_readable(exposure):
        over_segment(segment, output, inputs, op)
        return
    mapped = [segment.view(exposure, owner, output) for owner in range(size)] if exposure.mapped else []
    capacity = CACHE_BYTES // output.itemsize
    for piece in chunks(output.size, capacity):
        wanted = output[piece]
        if mapped:
            parts = [view[piece] for view in mapped]
        else:
            scratch = segment.scratch(output.dtype, size * capacity)
            parts = [scratch[owner * capacity : owner * capacity + wanted.size] for owner in range(size)]
            parts[rank] = inputs[rank][piece]
            for owner in range(size):
                if owner != rank:
                    segment.read(exposure, owner, piece.start, parts[owner])
        combine_in_place(op, parts, rank, wanted)
    segment.complete(exposure)


def write_other_shards(segment: Segment, slots: Sequence[Array], part: Array, mine: slice) -> list[Array]:
    """Write the other ranks' shards of an array to this rank's slot; return all parts of this rank's shard, by rank.

    This function ends a step. The caller should reduce into private memory and copy the result to a slot: a reduction
    directly into memory that another core has read took half as long again, for 1 MiB and 2 ranks.
    """
    rank = segment.rank
    slots[rank][: mine.start] = part[: mine.start]
    slots[rank][mine.stop :] = part[mine.stop :]
    segment.step()
    return [part[mine] if owner == rank else slot[mine] for owner, slot in enumerate(slots)]


def reduce_exposed(
    segment: Segment, exposure: Exposure, array: Array, op: ReduceOp
) -> Iterator[tuple[Sequence[Array], Array]]:
    """Reduce this rank's shard of the registered arrays; yield each piece's parts in those arrays, and the result."""
    views = [segment.view(exposure, owner, array) for owner in range(segment.size)]
    mine = shards(array.size, segment.size)[segment.rank]
    for piece in chunks(mine.stop - mine.start, CACHE_BYTES // array.itemsize):
        parts = [view[mine][piece] for view in views]
        reduced = segment.scratch(array.dtype, parts[0].size)
        combine(op, parts, reduced)
        yield parts, reduced


def small_link(link: DirectLink, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Each rank sends every other rank its input with the arrival message.

    Steps: 1. Each rank sends (size - 1) / size of its bytes. At most frames.SMALL bytes a rank.
    """
    arrived = link.all_exchange(each=[as_bytes(part) for part in inputs])
    parts = [np.frombuffer(payload, np.uint8).view(output.dtype) for payload in arrived]
    combine_in_place(op, parts, link.rank, output)


def doubling_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """An all_reduce of all inputs, of which each rank keeps its own: for short inputs, whose messages cost most.

    Steps: log2 size, and 2 if size is no power of two; 1 arrival more for more than frames.SMALL bytes. Each rank sends
    its bytes in each, in the precision of a partial result.
    """
    whole = np.concatenate(inputs)
    reduce_by_doubling(link, whole, op)
    begin = sum(part.size for part in inputs[: link.rank])
    output[:] = whole[begin : begin + output.size]


def ring_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Each rank's input travels the ring as a partial result and ends there: each rank sends to its successor only.

    The reduction follows the order of the ring, see all_reduce.ring_link for the consequences.

    Steps: size - 1, and the arrival. Each rank sends (size - 1) / size of its bytes, in the precision of a partial
    result.
    """
    rank, size = link.rank, link.size
    dtype = partial_dtype(op, output.dtype, size)
    totals = [np.empty(part.size, dtype) for part in inputs]
    for part, total in zip(inputs, totals, strict=True):
        combine_to_partial(op, [part], total)
    link.arrive()
    for step in range(1, size):
        sent, mine = totals[(rank - step) % size], totals[(rank - step - 1) % size]
        result = output if step == size - 1 else None
        reduce_received(link, (rank + 1) % size, sent, (rank - 1) % size, mine, op, result)


def direct_link(link: DirectLink, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Each rank sends every other rank its input; the receiver reduces the inputs in pieces, in the cache.

    Steps: 1 a piece. Each rank sends (size - 1) / size of its bytes and receives (size - 1) times its output.
    """
    for _ in reduce_chunks(link, output, inputs, op):
        pass


def reduce_chunks(
    link: DirectLink, output: Array | None, inputs: Sequence[Array], op: ReduceOp
) -> Iterator[tuple[slice, Array]]:
    """Arrive, exchange and reduce; yield each piece's slice of the inputs, and this rank's reduced piece.

    The next piece is in transit while this one is reduced and used. Ranks whose input is shorter yield empty arrays.

    Args:
        output: destination of the result; it may be this rank's own input. None selects memory that holds a piece until
            the piece after the next is yielded.
    """
    rank, size = link.rank, link.size
    mine = inputs[rank]
    piece = max(1, link.chunk_bytes // mine.itemsize)
    capacity = min(piece, mine.size)
    rows = link.scratch(2 * size * capacity * mine.itemsize).view(mine.dtype).reshape(2, size, capacity)
    others = link.others()

    def start(number: int) -> Exchange:
        part = slice(number * piece, (number + 1) * piece)
        count = mine[part].size
        sends = [(other, as_bytes(inputs[other][part])) for other in others]
        receives = [(other, as_bytes(rows[number % 2, other, :count])) for other in others]
        return link.start(sends, receives) if number else link.arrive_with(sends, receives)

    for number in pipelined(link, -(-max(part.size for part in inputs) // piece) or 1, start):
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


def reduce_received(
    link: Link, to: int, sent: Array, source: int, mine: Array, op: ReduceOp, result: Array | None
) -> None:
    """Send partial results to a rank, reduce those from another into ``mine``, or last into ``result``, by pieces."""
    piece = link.chunk_bytes // mine.itemsize
    capacity = min(piece, mine.size)
    rows = link.scratch(2 * capacity * mine.itemsize).view(mine.dtype).reshape(2, capacity)

    def start(number: int) -> Exchange:
        part = slice(number * piece, (number + 1) * piece)
        return link.start([(to, as_bytes(sent[part]))], [(source, as_bytes(rows[number % 2, : mine[part].size]))])

    for number in pipelined(link, -(-max(sent.size, mine.size) // piece), start):
        part = slice(number * piece, (number + 1) * piece)
        own = mine[part]
        parts = [own, rows[number % 2, : own.size]]
        if source < link.rank:
            parts.reverse()
        if result is not None:
            combine_partials(op, parts, link.size, result[part])
        else:
            combine_to_partial(op, parts, own)
