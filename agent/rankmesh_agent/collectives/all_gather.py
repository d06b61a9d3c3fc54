"""all_gather: every rank ends with every rank's array. The arrays may differ in length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array) -> None:
    """Chunk by chunk: all write, all read everything.

    Steps: 1 a chunk of the longest array, at least 1. Each rank writes its bytes once and reads all ranks'.
    """
    rank = segment.rank
    widest = max(output.size for output in outputs)
    room = segment.slot_bytes // array.itemsize
    for begin in range(0, widest or 1, room):
        part = array[begin : begin + room]
        slots = segment.slots(array.dtype, min(room, widest - begin))
        slots[rank][: part.size] = part
        segment.step()
        for owner, output in enumerate(outputs):
            if owner != rank:
                wanted = output[begin : begin + room]
                wanted[:] = slots[owner][: wanted.size]
    outputs[rank][:] = array


def direct_segment(segment: Segment, outputs: Sequence[Array], array: Array) -> None:
    """All read everyone's array where it lies.

    Steps: 2. Each rank reads all others' bytes once. If they cannot, 1 step more than over_segment.
    """
    rank = segment.rank
    others = [(rank + step) % segment.size for step in range(1, segment.size)]  # not all at the same one at once
    if any(np.may_share_memory(array, outputs[owner]) for owner in others):
        array = array.copy()
    shown = segment.windows.expose([array] * segment.size)
    if not shown.readable:
        over_segment(segment, outputs, array)
        return
    for owner in others:
        shown.read(owner, 0, outputs[owner])
    shown.complete()
    outputs[rank][:] = array


def small_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Everyone sends its array along as it arrives.

    Steps: 1. Each rank sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    for output, payload in zip(outputs, link.all_exchange(as_bytes(array)), strict=True):
        output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def direct_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Everyone sends its array to everyone, straight into their outputs.

    Steps: 1. Each rank sends (size - 1) times its bytes and receives all others'.
    """
    link.all_exchange()
    others = link.others()
    mine = as_bytes(array)
    link.exchange([(rank, mine) for rank in others], [(rank, as_bytes(outputs[rank])) for rank in others])
    outputs[link.rank][:] = array
