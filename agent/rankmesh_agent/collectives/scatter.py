"""scatter: each rank receives one of the root's arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.transports.segment import Segment


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
    exposure = segment.windows.expose(inputs if sending else [None] * segment.size)
    if not exposure.readable:
        over_segment(segment, output, inputs, root)
        return
    # The root copies its own array while the others read, unless the copy would overwrite an array that they read.
    early = sending and not any(np.may_share_memory(output, part) for part in inputs if part is not inputs[root])
    if early:
        output[:] = inputs[root]
    elif not sending:
        exposure.read(root, 0, output)
    exposure.complete()
    if sending and not early:
        output[:] = inputs[root]


def small_link(link: Link, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The root sends each rank its array with its arrival message.

    Steps: 1. The root sends all bytes once, the others receive theirs. At most frames.SMALL bytes a rank.
    """
    each = [as_bytes(part) for part in inputs] if link.rank == root else None
    output[:] = np.frombuffer(link.all_exchange(each=each)[root], np.uint8).view(output.dtype)


def direct_link(link: Link, output: Array, inputs: Sequence[Array], root: int) -> None:
    """The root sends each rank its array, directly into the rank's output.

    Steps: 1. The root sends all bytes once, the others receive theirs.
    """
    link.all_exchange()
    if link.rank == root:
        link.exchange([(rank, as_bytes(inputs[rank])) for rank in link.others()], [])
        output[:] = inputs[root]
    else:
        link.exchange([], [(root, as_bytes(output))])
