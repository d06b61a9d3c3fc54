"""all_reduce: every rank ends with the reduction of all ranks' arrays."""

from __future__ import annotations

from collections import deque

import numpy as np

from rankmesh_agent.collectives.link import CHUNK_BYTES, Array, Exchange, Link, as_bytes, chunks, pipelined, shards
from rankmesh_agent.collectives.reduce_scatter import MAX_UNFINISHED, reduce_chunks, reduce_exposed, write_other_shards
from rankmesh_agent.collectives.reduction import (
    combine,
    combine_in_place,
    combine_partials,
    combine_to_partial,
    partial_dtype,
)
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp

_TINY = 1 << 10
"""Bytes up to which a list takes longer to make than a third array in the cache costs."""


def small_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """All write, all read everything and reduce it themselves.

    Steps: 1. Each rank writes its bytes once and reads all ranks' once. At most a slot.
    """
    rank = segment.rank
    slots = segment.slots(array.dtype, array.size)
    slots[rank][:] = array
    segment.step()
    if rank <= 1 and array.nbytes > _TINY:
        # The result may take the place of the first part, and of the second: two arrays in the cache, not three.
        slots = slots.copy()
        slots[rank] = array
    combine(op, slots, array)


def chunked_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """Chunk by chunk: all write the others' shares, each rank reduces its own and writes it, all read the others'.

    Steps: 2 a chunk. Each rank writes its bytes once and reads 2 (size - 1) / size of them.
    """
    rank = segment.rank
    room = segment.slot_bytes // array.itemsize
    scratch = segment.scratch(array.dtype, -(-min(room, array.size) // segment.size) if rank > 1 else 0)
    for chunk in chunks(array.size, room):
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
    """Each rank reduces its share straight from everyone's arrays, and writes it into all of them.

    Steps: 2. Each rank reads and writes as many bytes as it has. If an array is not registered, 1 step more than
    chunked_segment.
    """
    shown = segment.windows.expose([array] * segment.size)
    if not shown.mapped:
        chunked_segment(segment, array, op)
        return
    for parts, reduced in reduce_exposed(segment, shown, array, op):
        for part in parts:
            part[:] = reduced
    shown.complete()


def small_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Everyone sends everything to everyone.

    Steps: 1. Each rank sends and receives (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(as_bytes(array))
    parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
    combine_in_place(op, parts, link.rank, array)


def star_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Everyone sends everything to rank 0, which reduces it and sends everyone the result.

    Steps: 2. Each rank sends and receives its bytes once, rank 0 (size - 1) times: fewer messages than small_link in
    all, which is what counts where ranks share cores. At most frames.SMALL bytes.
    """

    def reduced(arrived: list[memoryview | bytes]) -> memoryview:
        parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
        combine_in_place(op, parts, 0, array)
        return as_bytes(array)

    answer = link.via_root(as_bytes(array), reduced)
    if link.rank:
        array[:] = np.frombuffer(answer, np.uint8).view(array.dtype)


def direct_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Piece by piece, each rank reduces its share and sends it to all, while the next piece is under way.

    Steps: one a piece, and 1 more. Each rank sends and receives 2 (size - 1) / size of its bytes, as round a ring, but
    a share is reduced in rank order by one rank: no transport gives another result, and float16 is rounded once.
    """
    link.all_exchange()
    split = [array[share] for share in shards(array.size, link.size)]
    mine = split[link.rank]
    others = link.others()
    under_way: deque[Exchange] = deque()
    for piece, reduced in reduce_chunks(link, mine, split, op):
        sends = [(rank, as_bytes(reduced)) for rank in others]
        under_way.append(link.start(sends, [(rank, as_bytes(split[rank][piece])) for rank in others]))
        if len(under_way) > MAX_UNFINISHED:
            link.finish(under_way.popleft())
    for gathering in under_way:
        link.finish(gathering)


def ring_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Each share goes round once to be reduced, and once more as the result; every rank sends to the next one alone.

    A share is reduced in the order of the ring, from another rank on for each: sums may differ from another algorithm's
    in their last bits, but are the same on all ranks. What has to be wider on its way than it is, such as float16,
    would be twice as many bytes: that takes direct_link.

    Steps: 2 (size - 1), and 1 more. Each rank sends and receives 2 (size - 1) / size of its bytes.
    """
    if partial_dtype(op, array.dtype, link.size) != array.dtype:
        direct_link(link, array, op)
        return
    rank, size = link.rank, link.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    split = [array[share] for share in shards(array.size, size)]
    link.all_exchange()
    for step in range(1, size):
        sent, mine = split[rank - step + 1], split[rank - step]
        _reduce_received(link, following, sent, previous, mine, op, last=step == size - 1)
    for step in range(1, size):
        sent, received = split[(rank - step + 2) % size], split[(rank - step + 1) % size]
        link.exchange([(following, as_bytes(sent))], [(previous, as_bytes(received))])


def halving_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Neighbours swap halves of what they have, reduce them, and go on with those at twice the distance; then back.

    The order of reduction is that of a tree; for that, and for what has to be wider on its way, see ring_link. Where
    the ranks are no power of two some would have to send all their bytes in addition: that takes direct_link as well.

    Steps: 2 log2 size, and 1 more. Each rank sends and receives 2 (size - 1) / size of its bytes, in as many messages.
    """
    size = link.size
    if size & (size - 1) or partial_dtype(op, array.dtype, size) != array.dtype:
        direct_link(link, array, op)
        return
    link.all_exchange()
    kept, swapped, distance = array, [], 1
    while distance < size:
        partner, middle = link.rank ^ distance, -(-kept.size // 2)
        given, kept = (kept[:middle], kept[middle:]) if link.rank & distance else (kept[middle:], kept[:middle])
        _reduce_received(link, partner, given, partner, kept, op, last=2 * distance == size)
        swapped.append((partner, given, kept))
        distance *= 2
    for partner, given, kept in reversed(swapped):
        link.exchange([(partner, as_bytes(kept))], [(partner, as_bytes(given))])


def _reduce_received(link: Link, to: int, sent: Array, source: int, mine: Array, op: ReduceOp, *, last: bool) -> None:
    """Send an array to a rank and reduce what another one sends with ``mine``, piece by piece, into ``mine``.

    Args:
        last: nothing is missing after this.
    """
    piece = CHUNK_BYTES // mine.itemsize
    room = min(piece, mine.size)
    rows = link.scratch(2 * room * mine.itemsize).view(mine.dtype).reshape(2, room)

    def start(number: int) -> Exchange:
        part = slice(number * piece, (number + 1) * piece)
        return link.start([(to, as_bytes(sent[part]))], [(source, as_bytes(rows[number % 2, : mine[part].size]))])

    for number in pipelined(link, -(-max(sent.size, mine.size) // piece), start):
        own = mine[number * piece : (number + 1) * piece]
        parts = [own, rows[number % 2, : own.size]]
        if source < link.rank:
            parts.reverse()
        if last:
            combine_partials(op, parts, link.size, own)
        else:
            combine_to_partial(op, parts, own)
