"""gather: the root receives the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Link, as_bytes
from rankmesh_agent.collectives.rounds import Rounds, distances
from rankmesh_agent.shared_memory.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array, root: int) -> None:
    """In chunks, all ranks except the root write to their slots, and the root reads them.

    Steps: 1 a chunk, at least 1. Each rank writes its bytes once; the root reads all.
    """
    rank = segment.rank
    capacity = segment.chunk(array.dtype)
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
    exposure = segment.expose([array if owner == root and not receiving else None for owner in range(segment.size)])
    if not segment.is_readable(exposure):
        over_segment(segment, outputs, array, root)
        return
    if receiving:
        for owner, output in enumerate(outputs):
            if owner != root:
                segment.read(exposure, owner, 0, output, owner_idle=True)
        outputs[root][:] = array
    segment.complete(exposure)


def small_link(link: DirectLink, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Each rank sends its array to the root with its arrival message.

    Steps: 1. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """
    arrived = link.all_exchange(each=[as_bytes(array) if rank == root else b"" for rank in range(link.size)])
    if link.rank == root:
        for output, payload in zip(outputs, arrived, strict=True):
            output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def star_link(link: DirectLink, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Each rank sends its array to the root, which confirms when it has received all.

    Steps: 2. Each rank sends its bytes once, the root receives all. At most frames.SMALL bytes.
    """

    def store(arrived: list[memoryview | bytes]) -> bytes:
        for output, payload in zip(outputs, arrived, strict=True):
            output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)
        return b""

    link.via_root(root, as_bytes(array), store)


def tree_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """The arrays follow a binomial tree to the root; each rank adds its own.

    Steps: log2 size, twice that for more than frames.SMALL bytes in a message. Each rank but the root sends its bytes
    and those of the ranks below it, at most size / 2 times its own, once; the root receives all.
    """
    size, nbytes = link.size, array.nbytes
    ahead = (root - link.rank) % size  # ranks between this one and the root
    rounds = Rounds(link, nbytes << (size.bit_length() - 1))
    blocks = [as_bytes(array)]  # of this rank and of those behind it, in this order
    for distance in distances(size):
        sends, receives = ahead % (2 * distance) == distance, ahead % (2 * distance) == 0
        below = max(0, min(distance, size - ahead - distance)) if receives else 0
        received = rounds.shift(distance, b"".join(blocks) if sends else b"", below * nbytes)
        if below:
            blocks.append(memoryview(received))
    if not ahead:
        behind = 0
        for block in blocks:
            for begin in range(0, len(block), nbytes or 1):
                output = outputs[(root - behind) % size]
                output[:] = np.frombuffer(block[begin : begin + nbytes], np.uint8).view(output.dtype)
                behind += 1


def direct_link(link: Link, outputs: Sequence[Array], array: Array, root: int) -> None:
    """Each rank sends its array to the root, directly into the root's output.

    Steps: 1. Each rank sends its bytes once, the root receives all.
    """
    link.arrive()
    if link.rank == root:
        link.exchange([], [(rank, as_bytes(outputs[rank])) for rank in link.others()])
        outputs[root][:] = array
    else:
        link.exchange([(root, as_bytes(array))], [])
