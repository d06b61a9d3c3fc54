"""all_reduce: every rank ends with the reduction of all ranks' arrays."""

from __future__ import annotations

from collections import deque

import numpy as np

from rankmesh_agent.collectives.link import Array, Exchange, Link, octets, pieces, shares
from rankmesh_agent.collectives.reduce_scatter import AHEAD, offer_others, reduce_pieces, reduce_shown
from rankmesh_agent.collectives.reduction import combine, combine_in_place
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp


def small_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """All write, all read everything and reduce it themselves.

    Steps: 1. Each rank writes its bytes once and reads all ranks' once. At most a slot.
    """
    rank = segment.rank
    slots = segment.slots(array.dtype, array.size)
    slots[rank][:] = array
    segment.step()
    if (
        rank <= 1
    ):  # the result may take the place of the first part, and of the second: two arrays in the cache, not three
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
    for chunk in pieces(array.size, room):
        part = array[chunk]
        split = shares(part.size, segment.size)
        mine = split[rank]
        slots = segment.slots(array.dtype, part.size)
        parts = offer_others(segment, slots, part, mine)
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
    shown = segment.windows.show([array] * segment.size)
    if not shown.mapped:
        chunked_segment(segment, array, op)
        return
    for parts, reduced in reduce_shown(segment, shown, array, op):
        for part in parts:
            part[:] = reduced
    shown.done()


def small_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Everyone sends everything to everyone.

    Steps: 1. Each rank sends and receives (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    arrived = link.enter(octets(array))
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
        return octets(array)

    answer = link.consult(octets(array), reduced)
    if link.rank:
        array[:] = np.frombuffer(answer, np.uint8).view(array.dtype)


def direct_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Piece by piece, each rank reduces its share and sends it to all, while the next piece is under way.

    Steps: one a piece, and 1 more. Each rank sends and receives 2 (size - 1) / size of its bytes, as round a ring, but
    a share is reduced in rank order by one rank: no transport gives another result, and float16 is rounded once.
    """
    link.enter()
    split = [array[share] for share in shares(array.size, link.size)]
    mine = split[link.rank]
    others = link.others()
    under_way: deque[Exchange] = deque()
    for piece, reduced in reduce_pieces(link, mine, split, op):
        sends = [(rank, octets(reduced)) for rank in others]
        under_way.append(link.start(sends, [(rank, octets(split[rank][piece])) for rank in others]))
        if len(under_way) > AHEAD:
            link.finish(under_way.popleft())
    for gathering in under_way:
        link.finish(gathering)
