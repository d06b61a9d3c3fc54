"""reduce_scatter: every rank ends with the reduction of one of the arrays that each rank has for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import PIECE, Array, Link, octets, pieces
from rankmesh_agent.collectives.reduction import combine, combine_in_place
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import ReduceOp


def over_segment(segment: Segment, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Chunk by chunk: all write a lane of their slot for each rank, which reduces the lanes that are for it.

    Steps: 1 a chunk of the longest output, at least 1. Each rank writes its bytes once and reads 1/size of all.
    """
    rank = segment.rank
    lane = segment.lane(output.dtype)
    widest = max(part.size for part in inputs)
    for begin in range(0, widest or 1, lane):
        slots = segment.slots(output.dtype, lane * segment.size)
        mine = slots[rank]
        for owner, part in enumerate(inputs):
            piece = part[begin : begin + lane]
            mine[owner * lane : owner * lane + piece.size] = piece
        segment.step()
        wanted = output[begin : begin + lane]
        own = slice(rank * lane, rank * lane + wanted.size)
        combine(op, [slot[own] for slot in slots], wanted)


def direct_segment(segment: Segment, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Each rank reduces what is for it where it lies, or piece by piece as it reads it.

    Steps: 2. Each rank reads (size - 1) / size of its bytes. If they cannot, 1 step more than over_segment.
    """
    rank, size = segment.rank, segment.size
    if any(np.may_share_memory(output, part) for part in inputs):
        inputs = [part.copy() for part in inputs]
    shown = segment.windows.show(inputs)
    if not shown.readable:
        over_segment(segment, output, inputs, op)
        return
    mapped = [shown.view(owner, output) for owner in range(size)] if shown.mapped else []
    room = PIECE // output.itemsize
    for piece in pieces(output.size, room):
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
    shown.done()


def small_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Everyone sends each rank what is for it along as it arrives.

    Steps: 1. Each rank sends (size - 1) / size of its bytes. At most frames.SMALL bytes a rank.
    """
    arrived = link.enter(each=[octets(part) for part in inputs])
    parts = [np.frombuffer(payload, np.uint8).view(output.dtype) for payload in arrived]
    combine_in_place(op, parts, link.rank, output)


def direct_link(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Everyone sends each rank what is for it; that is reduced piece by piece, in the cache.

    Steps: 1 a piece. Each rank sends (size - 1) / size of its bytes and receives (size - 1) times its output.
    """
    link.enter()
    reduce_pieces(link, output, inputs, op)


def reduce_pieces(link: Link, output: Array, inputs: Sequence[Array], op: ReduceOp) -> None:
    """Exchange and reduce, after the arrival; ``output`` may be this rank's own one of ``inputs``."""
    others = link.others()
    mine = inputs[link.rank]
    piece = max(1, PIECE // output.itemsize)
    scratch = np.empty((link.size, min(piece, output.size)), output.dtype)
    for begin in range(0, max(part.size for part in inputs), piece):
        wanted = output[begin : begin + piece]
        own = mine[begin : begin + piece]
        parts = [own if rank == link.rank else scratch[rank, : wanted.size] for rank in range(link.size)]
        link.exchange(
            [(rank, octets(inputs[rank][begin : begin + piece])) for rank in others],
            [(rank, octets(parts[rank])) for rank in others],
        )
        combine_in_place(op, parts, link.rank, wanted)
