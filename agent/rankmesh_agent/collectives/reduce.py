"""reduce: the root receives the reduction of the arrays of all ranks; the arrays of the other ranks stay unchanged."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.all_reduce import halving_link
from rankmesh_agent.collectives.link import Array, DirectLink, Exchange, Link, as_bytes, chunks, shards
from rankmesh_agent.collectives.reduce_scatter import reduce_chunks, reduce_exposed, write_other_shards
from rankmesh_agent.collectives.reduction import (
    combine,
    combine_in_place,
    combine_partials,
    combine_to_partial,
    partial_dtype,
)
from rankmesh_agent.collectives.rounds import Rounds, distances
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp


def small_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank writes its array to its slot; the root reads all slots and reduces them.

    Steps: 1. Each rank writes its bytes once, the root reads all ranks' once. At most a slot.
    """
    slots = segment.slots(array.dtype, array.size)
    slots[segment.rank][:] = array
    segment.step()
    if segment.rank == root:
        combine(op, slots, array)


def chunked_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """In chunks, each rank writes the other ranks' shards, reduces its own shard and writes the result for the root.

    Steps: 2 a chunk. Each rank writes its bytes once and reads (size - 1) / size of them; the root writes
    (size - 1) / size of them and reads them twice.
    """
    rank = segment.rank
    capacity = segment.slot_bytes // array.itemsize
    scratch = segment.scratch(array.dtype, -(-min(capacity, array.size) // segment.size))
    for chunk in chunks(array.size, capacity):
        part = array[chunk]
        split = shards(part.size, segment.size)
        mine = split[rank]
        slots = segment.slots(array.dtype, part.size)
        parts = write_other_shards(segment, slots, part, mine)
        reduced = scratch[: mine.stop - mine.start]
        combine(op, parts, reduced)
        (part if rank == root else slots[rank])[mine] = reduced
        segment.step()
        if rank == root:
            for owner, share in enumerate(split):
                if owner != rank:
                    part[share] = slots[owner][share]


def registered_segment(segment: Segment, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank reduces its shard directly from the registered arrays of all ranks and writes it into the root's array.

    Steps: 2. Each rank reads its bytes and writes 1/size of them. If an array is not registered, 1 step more than
    chunked_segment.
    """
    exposure = segment.expose([array] * segment.size)
    if not exposure.mapped:
        chunked_segment(segment, array, op, root)
        return
    for parts, reduced in reduce_exposed(segment, exposure, array, op):
        parts[root][:] = reduced
    segment.complete(exposure)


def small_link(link: DirectLink, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank sends its array to the root with its arrival message.

    Steps: 1. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(each=[as_bytes(array) if rank == root else b"" for rank in range(link.size)])
    if link.rank == root:
        parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
        combine_in_place(op, parts, root, array)


def star_link(link: DirectLink, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank sends its array to the root, which confirms when it has received all.

    Steps: 2. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """

    def reduce(arrived: list[memoryview | bytes]) -> bytes:
        parts = [np.frombuffer(payload, np.uint8).view(array.dtype) for payload in arrived]
        combine_in_place(op, parts, root, array)
        return b""

    link.via_root(root, as_bytes(array), reduce)


def tree_link(link: Link, array: Array, op: ReduceOp, root: int) -> None:
    """Partial results follow a binomial tree to the root.

    The reduction follows the order of a tree over the ranks from the root's successor to the root: the last bits of a
    sum may differ from those of another algorithm.

    Steps: log2 size, twice that for more than frames.SMALL bytes. Each rank but the root sends its bytes once, with the
    precision of a partial result; the root receives them log2 size times.
    """
    size = link.size
    ahead = (root - link.rank) % size  # ranks between this one and the root
    dtype = partial_dtype(op, array.dtype, size)
    total = np.empty(array.size, dtype)
    combine_to_partial(op, [array], total)
    rounds = Rounds(link, total.nbytes)
    for distance in distances(size):
        sends = ahead % (2 * distance) == distance
        receives = ahead % (2 * distance) == 0 and ahead + distance < size
        received = rounds.shift(distance, as_bytes(total) if sends else b"", total.nbytes if receives else 0)
        if receives:
            merged = np.empty(array.size, dtype)
            combine_to_partial(op, [np.frombuffer(received, np.uint8).view(dtype), total], merged)
            total = merged
    if not ahead:
        combine_partials(op, [total], size, array)


def all_reduce_link(link: Link, array: Array, op: ReduceOp, root: int) -> None:
    """An all_reduce whose result only the root keeps: of many ranks, it moves fewer bytes than a tree.

    Steps: those of all_reduce.halving_link, and its bytes.
    """
    halving_link(link, array if link.rank == root else array.copy(), op)


def direct_link(link: DirectLink, array: Array, op: ReduceOp, root: int) -> None:
    """Each rank reduces its shard in pieces and sends each result to the root during the exchange of the next piece.

    Steps: one a piece, and 1 more. Each rank sends its bytes once; the root receives 2 (size - 1) / size of its own.
    """
    split = [array[share] for share in shards(array.size, link.size)]
    at_root = link.rank == root
    others = link.others()
    pending: Exchange = None
    for piece, reduced in reduce_chunks(link, split[root] if at_root else None, split, op):
        sends = [] if at_root else [(root, as_bytes(reduced))]
        exchange = link.start(sends, [(rank, as_bytes(split[rank][piece])) for rank in others] if at_root else [])
        if pending is not None:
            link.finish(pending)
        pending = exchange
    if pending is not None:
        link.finish(pending)
