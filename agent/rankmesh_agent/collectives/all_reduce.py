"""all_reduce: every rank receives the reduction of the arrays of all ranks."""

from __future__ import annotations

from collections import deque

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Exchange, Link, as_bytes, chunks, shards
from rankmesh_agent.collectives.reduce_scatter import (
    MAX_UNFINISHED,
    reduce_chunks,
    reduce_exposed,
    reduce_received,
    write_other_shards,
)
from rankmesh_agent.collectives.reduction import combine, combine_in_place, partial_dtype
from rankmesh_agent.collectives.rounds import reduce_by_doubling, to_partials
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp

_TINY = 1 << 10
"""Bytes up to which building a list costs more than a third array in the cache."""


def small_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """Each rank writes its array to its slot, reads the slots of all ranks and reduces them itself.

    Steps: 1. Each rank writes its bytes once and reads all ranks' once. At most a slot.
    """
    rank = segment.rank
    slots = segment.slots(array.dtype, array.size)
    slots[rank][:] = array
    segment.step()
    if rank <= 1 and array.nbytes > _TINY:
        # The result may overwrite the first or the second part: two arrays in the cache instead of three.
        slots = slots.copy()
        slots[rank] = array
    combine(op, slots, array)


def chunked_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """In chunks, each rank writes the other ranks' shards, reduces and writes its own one, and reads the results.

    Steps: 2 a chunk. Each rank writes its bytes once and reads 2 (size - 1) / size of them.
    """
    rank = segment.rank
    capacity = segment.slot_bytes // array.itemsize
    scratch = segment.scratch(array.dtype, -(-min(capacity, array.size) // segment.size) if rank > 1 else 0)
    for chunk in chunks(array.size, capacity):
        part = array[chunk]
        split = shards(part.size, segment.size)
        mine = split[rank]
        slots = segment.slots(array.dtype, part.size)
        parts = write_other_shards(segment, slots, part, mine)
        own = part[mine]
        reduced = own if rank <= 1 else scratch[: own.size]  # see small_segment
        combine(op, parts, reduced)
        slots[rank][mine] = reduced
        if rank > 1:
            own[:] = reduced
        segment.step()
        for owner, share in enumerate(split):
            if owner != rank:
                part[share] = slots[owner][share]


def registered_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """Each rank reduces its shard directly from all ranks' registered arrays and writes the result into all of them.

    Steps: 2. Each rank reads and writes as many bytes as it has. If an array is not registered, 1 step more than
    chunked_segment.
    """
    exposure = segment.expose([array] * segment.size)
    if not exposure.mapped:
        chunked_segment(segment, array, op)
        return
    for parts, reduced in reduce_exposed(segment, exposure, array, op):
        for part in parts:
            part[:] = reduced
    segment.complete(exposure)


def small_link(link: DirectLink, array: Array, op: ReduceOp) -> None:
    """Each rank sends its array to every other rank.

    Steps: 1. Each rank sends and receives (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(array.view(np.uint8).data)  # as_bytes, written out: short calls come here
    dtype = array.dtype
    parts = [np.frombuffer(payload, dtype) for payload in arrived]
    combine_in_place(op, parts, link.rank, array)


def star_link(link: DirectLink, array: Array, op: ReduceOp) -> None:
    """Each rank sends its array to rank 0, which reduces the arrays and sends the result to every rank.

    Steps: 2. Each rank sends and receives its bytes once, rank 0 (size - 1) times: fewer messages in total than
    small_link, the dominant cost where ranks share cores. At most frames.SMALL bytes.
    """

    def reduced(arrived: list[memoryview | bytes]) -> memoryview:
        parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
        combine_in_place(op, parts, 0, array)
        return as_bytes(array)

    answer = link.via_root(0, as_bytes(array), reduced)
    if link.rank:
        array[:] = np.frombuffer(answer, np.uint8).view(array.dtype)


def doubling_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Recursive doubling: ranks at doubling distances exchange partial results, which travel with their precision.

    The reduction follows the order of a tree, see ring_link for the consequences.

    Steps: log2 size, and 2 if size is no power of two. Each rank sends and receives its bytes in each, in the precision
    of a partial result; 1 arrival more if those are more than frames.SMALL. Where ranks share cores, at most
    frames.SMALL bytes follow a tree to rank 0 and back instead: 2 log2 size steps, 2 (size - 1) messages.
    """
    reduce_by_doubling(link, array, op)


def direct_link(link: DirectLink, array: Array, op: ReduceOp) -> None:
    """Each rank reduces its shard in pieces and sends each result to all ranks during the exchange of the next piece.

    Steps: one a piece, of which the first is the arrival, and 1 more. Each rank sends and receives 2 (size - 1) / size
    of its bytes, as round a ring, but one rank reduces a shard in rank order: the result equals that of the other
    transports, and float16 is rounded once.
    """
    split = [array[share] for share in shards(array.size, link.size)]
    mine = split[link.rank]
    others = link.others()
    pending: deque[Exchange] = deque()
    for piece, reduced in reduce_chunks(link, mine, split, op):
        sends = [(rank, as_bytes(reduced)) for rank in others]
        pending.append(link.start(sends, [(rank, as_bytes(split[rank][piece])) for rank in others]))
        if len(pending) > MAX_UNFINISHED:
            link.finish(pending.popleft())
    for exchange in pending:
        link.finish(exchange)


def ring_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Ring algorithm: each shard travels the ring once as a partial sum and once as the result.

    Every rank sends to its successor only. The reduction of a shard follows the order of the ring, and each shard
    starts at another rank: the last bits of a sum may differ from those of another algorithm, but are the same on all
    ranks.

    Steps: 2 (size - 1), and the arrival. Each rank sends and receives 2 (size - 1) / size of its bytes; those of a
    dtype with wider partial results count in that one the first time.
    """
    rank, size = link.rank, link.size
    dtype = partial_dtype(op, array.dtype, size)
    successor, predecessor = (rank + 1) % size, (rank - 1) % size
    split = shards(array.size, size)
    total = to_partials(array, op, dtype)
    link.arrive()
    for step in range(1, size):
        sent, mine = split[rank - step + 1], split[rank - step]
        result = array[mine] if step == size - 1 else None
        reduce_received(link, successor, total[sent], predecessor, total[mine], op, result)
    for step in range(1, size):
        sent, received = split[(rank - step + 2) % size], split[(rank - step + 1) % size]
        link.exchange([(successor, as_bytes(array[sent]))], [(predecessor, as_bytes(array[received]))])


def halving_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Recursive halving and doubling: neighbours exchange halves and reduce them, then ranks at twice the distance.

    After the last reduction, the ranks exchange the results in reverse. The reduction follows the order of a tree, see
    ring_link for the consequences. Of numbers of ranks that are no power of two, the first ranks reduce in pairs
    before, and share the result after.

    Steps: 2 log2 size, 2 more if size is no power of two, and the arrival. Each rank sends and receives
    2 (size - 1) / size of its bytes, in as many messages, and at most as many again in the pairs; those of a dtype with
    wider partial results count in that one before the last reduction.
    """
    rank, size = link.rank, link.size
    dtype = partial_dtype(op, array.dtype, size)
    power = 1 << (size.bit_length() - 1)
    paired = size - power
    total = to_partials(array, op, dtype)
    link.arrive()
    if rank < 2 * paired:
        if rank % 2 == 0:
            pieces = chunks(array.size, link.chunk_bytes // dtype.itemsize)
            link.exchange([(rank + 1, as_bytes(total[piece])) for piece in pieces], [(rank + 1, as_bytes(array))])
            return
        reduce_received(link, rank - 1, total[:0], rank - 1, total, op, None)
    place = rank // 2 if rank < 2 * paired else rank - paired
    kept, swapped, distance = slice(0, array.size), [], 1
    while distance < power:
        partner = place ^ distance
        other = 2 * partner + 1 if partner < paired else partner + paired
        middle = kept.start + -(-(kept.stop - kept.start) // 2)
        given, kept = slice(kept.start, middle), slice(middle, kept.stop)
        if not place & distance:
            given, kept = kept, given
        result = array[kept] if 2 * distance == power else None
        reduce_received(link, other, total[given], other, total[kept], op, result)
        swapped.append((other, given, kept))
        distance *= 2
    for other, given, kept in reversed(swapped):
        link.exchange([(other, as_bytes(array[kept]))], [(other, as_bytes(array[given]))])
    if rank < 2 * paired:
        link.exchange([(rank - 1, as_bytes(array))], [])
