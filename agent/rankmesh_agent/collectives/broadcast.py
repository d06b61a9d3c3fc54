"""broadcast: every rank receives the root's array."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes, chunks, shards
from rankmesh_agent.transports.segment import Segment


def over_segment(segment: Segment, array: Array, root: int) -> None:
    """In chunks, the root writes to its slot and the other ranks read it.

    Steps: 1 a chunk, at least 1. The root writes its bytes once, the others read them once.
    """
    sending = segment.rank == root
    for chunk in chunks(array.size, segment.slot_bytes // array.itemsize) or [slice(0, 0)]:
        part = array[chunk]
        slot = segment.slots(array.dtype, part.size)[root]
        if sending:
            slot[:] = part
        segment.step()
        if not sending:
            part[:] = slot


def direct_segment(segment: Segment, array: Array, root: int) -> None:
    """The other ranks read the array from the root's memory.

    Steps: 2. The others read its bytes once. If they cannot, 1 step more than over_segment.
    """
    sending = segment.rank == root
    exposure = segment.windows.expose([array if sending else None] * segment.size)
    if not exposure.readable:
        over_segment(segment, array, root)
        return
    if not sending:
        exposure.read(root, 0, array, owner_idle=segment.size == 2)
    exposure.complete()


def small_link(link: Link, array: Array, root: int) -> None:
    """The root sends its array with its arrival message.

    Steps: 1. The root sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    if link.rank == root:
        link.all_exchange(as_bytes(array))
    else:
        array[:] = np.frombuffer(link.all_exchange()[root], np.uint8).view(array.dtype)


def scatter_link(link: Link, array: Array, root: int) -> None:
    """The root scatters shards, then all ranks gather them (van de Geijn).

    Steps: 2. The root sends 2 (size - 1) / size of its bytes, the others (size - 1) / size and receive all once;
    a tree would have the root send its bytes log2(size) times.
    """
    link.all_exchange()
    others = link.others()
    split = [as_bytes(array[share]) for share in shards(array.size, link.size)]
    mine = split[link.rank]
    if link.rank == root:
        link.exchange([(rank, split[rank]) for rank in others], [])
        link.exchange([(rank, mine) for rank in others], [])
    else:
        link.exchange([], [(root, mine)])
        peers = [rank for rank in others if rank != root]
        link.exchange([(rank, mine) for rank in peers], [(rank, split[rank]) for rank in others])
