"""all_reduce: every rank ends with the reduction of all ranks' arrays."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.link import PIECE, Array, Link, octets, pieces, shares
from rankmesh_agent.collectives.reduce import combine
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp


def small_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """All write, all read everything and reduce it themselves.

    Steps: 1. Each rank writes its bytes once and reads all ranks' once. At most a slot.
    """
    slots = segment.slots(array.dtype, array.size)
    slots[segment.rank][:] = array
    segment.step()
    combine(op, slots, array)


def chunked_segment(segment: Segment, array: Array, op: ReduceOp) -> None:
    """Chunk by chunk: all write, each rank reduces its share and writes it back, all read the others' shares.

    Steps: 2 a chunk. Each rank writes 1 + 1/size of its bytes and reads 2 of them.
    """
    rank = segment.rank
    for chunk in pieces(array.size, segment.slot_bytes // array.itemsize):
        part = array[chunk]
        slots = segment.slots(array.dtype, part.size)
        slots[rank][:] = part
        segment.step()
        split = shares(part.size, segment.size)
        mine = split[rank]
        reduced = part[mine]
        combine(op, [slot[mine] for slot in slots], reduced)
        slots[rank][mine] = reduced
        segment.step()
        for owner, share in enumerate(split):
            if owner != rank:
                part[share] = slots[owner][share]


def small_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Everyone sends everything to everyone.

    Steps: 1. Each rank sends and receives (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    arrived = link.enter(octets(array))
    _combine_in_place(op, [np.frombuffer(payload, array.dtype) for payload in arrived], link.rank, array)


def direct_link(link: Link, array: Array, op: ReduceOp) -> None:
    """Reduce-scatter, piece by piece, then all-gather; each share goes straight to the rank that reduces it.

    Steps: one a piece, then 1. Each rank sends and receives 2 (size - 1) / size of its bytes, as round a ring, but
    a share is reduced in rank order by one rank: no transport gives another result, and float16 is rounded once.
    """
    link.enter()
    others = link.others()
    split = shares(array.size, link.size)
    widest = split[0].stop
    piece = max(1, PIECE // array.itemsize)
    scratch = np.empty((link.size, min(piece, widest)), array.dtype)
    mine = array[split[link.rank]]
    for begin in range(0, widest, piece):
        wanted = mine[begin : begin + piece]
        parts = [wanted if rank == link.rank else scratch[rank, : wanted.size] for rank in range(link.size)]
        link.exchange(
            [(rank, octets(array[split[rank]][begin : begin + piece])) for rank in others],
            [(rank, octets(parts[rank])) for rank in others],
        )
        _combine_in_place(op, parts, link.rank, wanted)
    link.exchange(
        [(rank, octets(mine)) for rank in others],
        [(rank, octets(array[split[rank]])) for rank in others],
    )


def _combine_in_place(op: ReduceOp, parts: list[Array], rank: int, out: Array) -> None:
    """Reduce in rank order although ``out`` is one of the parts and not the first."""
    if rank > 1:
        parts[rank] = out.copy()
    combine(op, parts, out)
