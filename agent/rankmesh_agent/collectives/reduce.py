"""reduce: the root ends with the reduction of all ranks' arrays; the others' stay as they are."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.link import PIECE, Array, Link, octets, pieces, shares
from rankmesh_agent.collectives.reduce_scatter import reduce_pieces
from rankmesh_agent.collectives.reduction import combine, combine_in_place
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp


def small_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """All write, the root reads everything and reduces it.

    Steps: 1. Each rank writes its bytes once, the root reads all ranks' once. At most a slot.
    """
    slots = segment.slots(array.dtype, array.size)
    slots[segment.rank][:] = array
    segment.step()
    if segment.rank == root:
        combine(op, slots, array)


def chunked_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """Chunk by chunk: all write, each rank reduces its share and writes it back, the root reads the shares.

    Steps: 2 a chunk. Each rank writes 1 + 1/size of its bytes and reads 1; the root reads 2.
    """
    rank = segment.rank
    room = segment.slot_bytes // array.itemsize
    scratch = segment.scratch(array.dtype, -(-min(room, array.size) // segment.size))
    for chunk in pieces(array.size, room):
        part = array[chunk]
        slots = segment.slots(array.dtype, part.size)
        slots[rank][:] = part
        segment.step()
        split = shares(part.size, segment.size)
        mine = split[rank]
        reduced = scratch[: mine.stop - mine.start]
        combine(op, [slot[mine] for slot in slots], reduced)
        slots[rank][mine] = reduced
        segment.step()
        if rank == root:
            for owner, share in enumerate(split):
                part[share] = slots[owner][share]


def registered_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank reduces its share straight from everyone's arrays, and writes it into the root's.

    Steps: 2. Each rank reads its bytes and writes 1/size of them. If an array is not registered, 1 step more than
    chunked_segment.
    """
    shown = segment.windows.show([array] * segment.size)
    if not shown.mapped:
        chunked_segment(segment, array, op, root)
        return
    everyone = [shown.view(owner, array) for owner in range(segment.size)]
    mine = shares(array.size, segment.size)[segment.rank]
    for piece in pieces(mine.stop - mine.start, PIECE // array.itemsize):
        parts = [theirs[mine][piece] for theirs in everyone]
        reduced = segment.scratch(array.dtype, parts[0].size)
        combine(op, parts, reduced)
        parts[root][:] = reduced
    shown.done()


def small_link(link: Link, array: Array, op: ReduceOp, root: int) -> None:
    """Everyone sends its array along to the root as it arrives.

    Steps: 1. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """
    arrived = link.enter(each=[octets(array) if rank == root else b"" for rank in range(link.size)])
    if link.rank == root:
        parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
        combine_in_place(op, parts, root, array)


def direct_link(link: Link, array: Array, op: ReduceOp, root: int) -> None:
    """Reduce-scatter, piece by piece, then everyone sends its share to the root.

    Steps: one a piece, then 1. Each rank sends its bytes once; the root receives 2 (size - 1) / size of its own.
    """
    link.enter()
    split = shares(array.size, link.size)
    mine = array[split[link.rank]]
    reduced = mine if link.rank == root else np.empty_like(mine)
    reduce_pieces(link, reduced, [array[share] for share in split], op)
    if link.rank == root:
        link.exchange([], [(rank, octets(array[split[rank]])) for rank in link.others()])
    else:
        link.exchange([(root, octets(reduced))], [])
