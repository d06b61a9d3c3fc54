"""scatter: each rank receives one of the root's arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Link, as_bytes
from rankmesh_agent.collectives.rounds import Rounds, distances
from rankmesh_agent.shared_memory.segment import Segment


def over_segment(segment: Segment, output: Array, inputs: Sequence[Array], root: int) -> None:
    """In chunks, the root writes one lane of its slot for each rank, and each rank reads its lane.

    Steps: 1 a chunk, at least 1. The root writes the others' bytes once, they read theirs.
    """
    rank = segment.rank
    lane = segment.lane(output.dtype)
    for begin in range(0, output.size or 1, lane):
        wanted = output[begin : begin + lane]
        lanes = segment.slots(output.dtype, lane * segment.size)[root]
        if rank == root:
            for owner, part in enumerate(inputs):
                if owner != root:
                    lanes[owner * lane : owner * lane + wanted.size] = part[begin : begin + lane]
        segment.step()
        if rank != root:
            wanted[:] = lanes[rank * lane : rank * lane + wanted.size]
    if rank == root:
        output[:] = inputs[root]


def direct_segment(segment: Segment, output: Array, inputs: Sequence[Array], root: int) -> None:
    """Each rank reads its array from the root's memory.

    Steps: 2. Each rank reads its bytes once. If they cannot, 1 step more than over_segment.
    """
    sending = segment.rank == root
    exposure = segment.expose(inputs if sending else [None] * segment.size)
    if not segment.is_readable(exposure):
        over_segment(segment, output, inputs, root)
        return
    # The root copies its own array while the others read, unless the copy would overwrite an array that they read.
    early = sending and not any(np.may_share_memory(output, part) for part in inputs if part is not inputs[root])
    if early:
        output[:] = inputs[root]
    elif not sending:
        segment.read(exposure, root, 0, output)
    segment.complete(exposure)
    if sending and not early:
        output[:] = inputs[root]


def small_link(link: DirectLink, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The root sends each rank its array with its arrival message.

    Steps: 1. The root sends all bytes once, the others receive theirs. At most frames.SMALL bytes a rank.
    """
    each = [as_bytes(part) for part in inputs] if link.rank == root else None
    output[:] = np.frombuffer(link.all_exchange(each=each)[root], np.uint8).view(output.dtype)


def star_link(link: DirectLink, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The root sends each rank its array once all ranks have arrived at the root.

    Steps: 2. The root sends all bytes once, the others receive theirs. At most frames.SMALL bytes a rank.
    """
    payload = link.via_root(root, b"", lambda _: [as_bytes(part) for part in inputs])
    output[:] = np.frombuffer(payload, np.uint8).view(output.dtype)


def tree_link(link: Link, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The arrays follow a binomial tree from the root: each step halves those that a rank has.

    Steps: log2 size, twice that for more than frames.SMALL bytes in a message. The root sends the bytes of all ranks
    once; each rank that has received passes on half of what it has, at each step.
    """
    size, nbytes = link.size, output.nbytes
    place = (link.rank - root) % size
    rounds = Rounds(link, nbytes * -(-size // 2))
    blocks: list[memoryview] = []  # for every ``distance``-th rank from this one
    if not place:
        blocks = [as_bytes(inputs[(root + behind) % size]) for behind in range(size)]
    for distance in distances(size):
        sends, receives = place < distance and place + distance < size, distance <= place < 2 * distance
        payload = b"".join(blocks[1::2]) if sends else b""
        if sends:
            blocks = blocks[::2]
        expected = -(-(size - place) // (2 * distance)) if receives else 0
        received = memoryview(rounds.shift(distance, payload, expected * nbytes))
        if receives:
            blocks = [received[block * nbytes : (block + 1) * nbytes] for block in range(expected)]
    output[:] = np.frombuffer(blocks[0], np.uint8).view(output.dtype)


def direct_link(link: Link, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The root sends each rank its array, directly into the rank's output.

    Steps: 1. The root sends all bytes once, the others receive theirs.
    """
    link.arrive()
    if link.rank == root:
        link.exchange([(rank, as_bytes(inputs[rank])) for rank in link.others()], [])
        output[:] = inputs[root]
    else:
        link.exchange([], [(root, as_bytes(output))])
