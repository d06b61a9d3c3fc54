"""gather: the root receives the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array, root: int) -> None:
    """In chunks, all ranks except the root write to their slots, and the root reads them.

    Steps: 1 a chunk, at least 1. Each rank writes its bytes once; the root reads all.
    """
    rank = segment.rank
    capacity = segment.slot_bytes // array.itemsize
    for begin in range(0, array.size or 1, capacity):
        part = array[begin : begin + capacity]
        slots = segment.slots(array.dtype, part.size)
        if rank != root:
            slots[rank][:] = part
        segment.step()
        if rank == root:
            for owner, output in enumerate(outputs):
                if owner != rank:
                    output[begin : begin + capacity] = slots[owner]
    if rank == root:
        outputs[rank][:] = array


def direct_segment(segment: Segment, outputs: Sequence[Array], array: Array, root: int) -> None:
    """The root reads the arrays from the memory of the other ranks.

    Steps: 2. The root reads all others' bytes once. If it cannot, 1 step more than over_segment.
    """
    receiving = segment.rank == root
    exposure = segment.windows.expose(
        [array if owner == root and not receiving else None for owner in range(segment.size)]
    )
    if not exposure.readable:
        over_segment(segment, outputs, array, root)
        return
    if receiving:
        for owner, output in enumerate(outputs):
            if owner != root:
                exposure.read(owner, 0, output, owner_idle=True)
        outputs[root][:] = array
    exposure.complete()


def small_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Each rank sends its array to the root with its arrival message.

    Steps: 1. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(each=[as_bytes(array) if rank == root else b"" for rank in range(link.size)])
    if link.rank == root:
        for output, payload in zip(outputs, arrived, strict=True):
            output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def direct_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Each rank sends its array to the root, directly into the root's output.

    Steps: 1. Each rank sends its bytes once, the root receives all.
    """
    link.all_exchange()
    if link.rank == root:
        link.exchange([], [(rank, as_bytes(outputs[rank])) for rank in link.others()])
        outputs[root][:] = array
    else:
        link.exchange([(root, as_bytes(array))], [])
