"""gather: the root ends with every rank's array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Chunk by chunk: all but the root write, the root reads.

    Steps: 1 a chunk, at least 1. Each rank writes its bytes once; the root reads all.
    """
    rank = segment.rank
    room = segment.slot_bytes // array.itemsize
    for begin in range(0, array.size or 1, room):
        part = array[begin : begin + room]
        slots = segment.slots(array.dtype, part.size)
        if rank != root:
            slots[rank][:] = part
        segment.step()
        if rank == root:
            for owner, output in enumerate(outputs):
                if owner != rank:
                    output[begin : begin + room] = slots[owner]
    if rank == root:
        outputs[rank][:] = array


def direct_segment(segment: Segment, outputs: Sequence[Array], array: Array, root: int) -> None:
    """The root reads everyone's array where it lies.

    Steps: 2. The root reads all others' bytes once. If it cannot, 1 step more than over_segment.
    """
    receiving = segment.rank == root
    shown = segment.windows.expose(
        [array if owner == root and not receiving else None for owner in range(segment.size)]
    )
    if not shown.readable:
        over_segment(segment, outputs, array, root)
        return
    if receiving:
        for owner, output in enumerate(outputs):
            if owner != root:
                shown.read(owner, 0, output, owner_idle=True)
        outputs[root][:] = array
    shown.complete()


def small_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Everyone sends its array along to the root as it arrives.

    Steps: 1. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(each=[as_bytes(array) if rank == root else b"" for rank in range(link.size)])
    if link.rank == root:
        for output, payload in zip(outputs, arrived, strict=True):
            output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def direct_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Everyone sends its array to the root, straight into its output.

    Steps: 1. Each rank sends its bytes once, the root receives all.
    """
    link.all_exchange()
    if link.rank == root:
        link.exchange([], [(rank, as_bytes(outputs[rank])) for rank in link.others()])
        outputs[root][:] = array
    else:
        link.exchange([(root, as_bytes(array))], [])
