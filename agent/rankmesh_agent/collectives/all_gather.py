"""all_gather: every rank receives the arrays of all ranks. The arrays may differ in length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array) -> None:
    """In chunks, each rank writes its array to its slot and reads the slots of the other ranks.

    Steps: 1 a chunk of the longest array, at least 1. Each rank writes its bytes once and reads all ranks'.
    """
    rank = segment.rank
    longest = max(output.size for output in outputs)
    capacity = segment.slot_bytes // array.itemsize
    for begin in range(0, longest or 1, capacity):
        part = array[begin : begin + capacity]
        slots = segment.slots(array.dtype, min(capacity, longest - begin))
        slots[rank][: part.size] = part
        segment.step()
        for owner, output in enumerate(outputs):
            if owner != rank:
                wanted = output[begin : begin + capacity]
                wanted[:] = slots[owner][: wanted.size]
    outputs[rank][:] = array


def direct_segment(segment: Segment, outputs: Sequence[Array], array: Array) -> None:
    """Each rank reads the arrays of the other ranks from their memory.

    Steps: 2. Each rank reads all others' bytes once. If they cannot, 1 step more than over_segment.
    """
    rank = segment.rank
    others = [(rank + step) % segment.size for step in range(1, segment.size)]  # each rank starts at another one
    if any(np.may_share_memory(array, outputs[owner]) for owner in others):
        array = array.copy()
    exposure = segment.windows.expose([array] * segment.size)
    if not exposure.readable:
        over_segment(segment, outputs, array)
        return
    for owner in others:
        exposure.read(owner, 0, outputs[owner])
    exposure.complete()
    outputs[rank][:] = array


def small_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array with its arrival message.

    Steps: 1. Each rank sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    for output, payload in zip(outputs, link.all_exchange(as_bytes(array)), strict=True):
        output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def direct_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array to every other rank, directly into the outputs.

    Steps: 1. Each rank sends (size - 1) times its bytes and receives all others'.
    """
    link.all_exchange()
    others = link.others()
    mine = as_bytes(array)
    link.exchange([(rank, mine) for rank in others], [(rank, as_bytes(outputs[rank])) for rank in others])
    outputs[link.rank][:] = array
