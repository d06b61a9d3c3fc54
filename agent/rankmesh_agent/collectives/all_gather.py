"""all_gather: every rank receives the arrays of all ranks. The arrays may differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from rankmesh_agent.collectives.link import Array, DirectLink, Link, as_bytes
from rankmesh_agent.collectives.rounds import Rounds, distances
from rankmesh_agent.shared_memory.segment import Segment


def over_segment(segment: Segment, outputs: Sequence[Array], array: Array) -> None:
    """In chunks, each rank writes its array to its slot and reads the slots of the other ranks.

    Steps: 1 a chunk of the longest array, at least 1. Each rank writes its bytes once and reads all ranks'.
    """
    rank = segment.rank
    longest = max(map(len, outputs))
    capacity = segment.chunk(array.dtype)
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
    exposure = segment.expose([array] * segment.size)
    if not segment.is_readable(exposure):
        over_segment(segment, outputs, array)
        return
    for owner in others:
        segment.read(exposure, owner, 0, outputs[owner])
    segment.complete(exposure)
    outputs[rank][:] = array


def small_link(link: DirectLink, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array with its arrival message.

    Steps: 1. Each rank sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    for output, payload in zip(outputs, link.all_exchange(as_bytes(array)), strict=True):
        output[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def star_link(link: DirectLink, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array to rank 0, which sends all of them to every rank.

    Steps: 2. Each rank sends its bytes once and receives all, rank 0 sends (size - 1) times all bytes. At most
    frames.SMALL bytes from all ranks.
    """
    everything = link.via_root(0, as_bytes(array), b"".join)
    begin = 0
    for output in outputs:
        output[:] = np.frombuffer(everything, np.uint8, output.nbytes, begin).view(output.dtype)
        begin += output.nbytes


def gather_payloads(link: Link, payload: bytes) -> list[bytes]:
    """Arrive at the call; return the payloads of all ranks, by rank, which may differ in length."""
    lengths = [np.empty(1, np.int64) for _ in range(link.size)]
    bruck_link(link, lengths, np.array([len(payload)]))
    outputs = [np.empty(int(length[0]), np.uint8) for length in lengths]
    bruck_link(link, outputs, np.frombuffer(payload, np.uint8))
    return [output.tobytes() for output in outputs]


def bruck_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends the arrays that it has to ranks at doubling distances: Bruck et al., Efficient algorithms for
    all-to-all communications in multiport message-passing systems, 1997.

    Steps: log2 size, twice that for more than frames.SMALL bytes from all ranks. Each rank sends and receives all
    others' bytes once in total.
    """
    rank, size = link.rank, link.size
    # Of this rank and of those behind it, in this order
    ordered = [outputs[(rank - back) % size] for back in range(size)]
    ends = [0, *accumulate(output.nbytes for output in ordered)]
    rounds = Rounds(link, ends[-1])
    blocks = np.empty(ends[-1], np.uint8).data
    blocks[: array.nbytes] = as_bytes(array)
    for distance in distances(size):
        count = min(distance, size - distance)
        sent, received = sum(output.nbytes for output in ordered[:count]), slice(ends[distance], ends[distance + count])
        payload = rounds.shift(distance, blocks[:sent], received.stop - received.start)
        blocks[received] = payload
    for begin, output in zip(ends, ordered, strict=False):
        output[:] = np.frombuffer(blocks, np.uint8, output.nbytes, begin).view(output.dtype)


def ring_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Each array travels the ring, directly from output to output: each rank sends to its successor only.

    Steps: size - 1, and the arrival. Each rank sends and receives all others' bytes once.
    """
    rank, size = link.rank, link.size
    link.arrive()
    outputs[rank][:] = array
    for step in range(1, size):
        sent, received = outputs[(rank - step + 1) % size], outputs[(rank - step) % size]
        link.exchange([((rank + 1) % size, as_bytes(sent))], [((rank - 1) % size, as_bytes(received))])


def direct_link(link: Link, outputs: Sequence[Array], array: Array) -> None:
    """Each rank sends its array to every other rank, directly into the outputs.

    Steps: 1. Each rank sends (size - 1) times its bytes and receives all others'.
    """
    link.arrive()
    others = link.others()
    mine = as_bytes(array)
    link.exchange([(rank, mine) for rank in others], [(rank, as_bytes(outputs[rank])) for rank in others])
    outputs[link.rank][:] = array
