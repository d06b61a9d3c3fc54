"""broadcast: every rank receives the root's array."""

from __future__ import annotations

import numpy as np

from rankmesh_agent.collectives.all_gather import bruck_link
from rankmesh_agent.collectives.link import (
    CHUNK_BYTES,
    Array,
    DirectLink,
    Exchange,
    Link,
    as_bytes,
    chunks,
    pipelined,
    shards,
)
from rankmesh_agent.collectives.rounds import Rounds, distances
from rankmesh_agent.collectives.scatter import tree_link as tree_scatter
from rankmesh_agent.shared_memory.segment import Segment

_CHUNKS, _MAX_CHUNKS = 8, 16
"""Chunks of an array that follows a tree, and the most CHUNK_BYTES in one: each costs every rank a sleep and a wakeup,
and the ranks that wait for the first one leave the cores to the others."""


def over_segment(segment: Segment, array: Array, root: int) -> None:
    """In chunks, the root writes to its slot and the other ranks read it.

    Steps: 1 a chunk, at least 1. The root writes its bytes once, the others read them once.
    """
    sending = segment.rank == root
    for chunk in chunks(array.size, segment.chunk(array.dtype)) or [slice(0, 0)]:
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
    exposure = segment.expose([array if sending else None] * segment.size)
    if not segment.is_readable(exposure):
        over_segment(segment, array, root)
        return
    if not sending:
        segment.read(exposure, root, 0, array, owner_idle=segment.size == 2)
    segment.complete(exposure)


def small_link(link: DirectLink, array: Array, root: int) -> None:
    """The root sends its array with its arrival message.

    Steps: 1. The root sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    if link.rank == root:
        link.all_exchange(as_bytes(array))
    else:
        array[:] = np.frombuffer(link.all_exchange()[root], np.uint8).view(array.dtype)


def star_link(link: DirectLink, array: Array, root: int) -> None:
    """The root sends its array to every rank once all ranks have arrived at the root.

    Steps: 2. The root sends (size - 1) times its bytes. At most frames.SMALL bytes.
    """
    payload = link.via_root(root, b"", lambda _: as_bytes(array))
    if link.rank != root:
        array[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def tree_link(link: Link, array: Array, root: int) -> None:
    """The array follows a binomial tree: after each step twice the ranks have it.

    Steps: log2 size, twice that for more than frames.SMALL bytes. The root sends its bytes log2 size times, another
    rank as often as there are steps after it has received them.
    """
    size = link.size
    place = (link.rank - root) % size
    rounds = Rounds(link, array.nbytes)
    payload: memoryview | bytes = as_bytes(array) if not place else b""
    for distance in distances(size):
        sends, receives = place < distance and place + distance < size, distance <= place < 2 * distance
        received = rounds.shift(distance, payload if sends else b"", array.nbytes if receives else 0)
        if receives:
            payload = received
    if place:
        array[:] = np.frombuffer(payload, np.uint8).view(array.dtype)


def scatter_link(link: Link, array: Array, root: int) -> None:
    """The root scatters shards, then all ranks gather them (van de Geijn).

    Steps: 2, and the arrival. The root sends 2 (size - 1) / size of its bytes, the others (size - 1) / size and receive
    all once; a tree would have the root send its bytes log2(size) times.
    """
    link.arrive()
    split = [array[share] for share in shards(array.size, link.size)]
    mine = split[link.rank]
    others = link.others()
    if link.rank == root:
        link.exchange([(rank, as_bytes(split[rank])) for rank in others], [])
        link.exchange([(rank, as_bytes(mine)) for rank in others], [])
    else:
        link.exchange([], [(root, as_bytes(mine))])
        peers = [rank for rank in others if rank != root]
        sends = [(rank, as_bytes(mine)) for rank in peers]
        link.exchange(sends, [(rank, as_bytes(split[rank])) for rank in others])


def tree_scatter_link(link: Link, array: Array, root: int) -> None:
    """The root scatters shards over a binomial tree, then all ranks gather them by Bruck's algorithm.

    Steps: 4 log2 size. The root sends its bytes twice, each other rank at most 1.5 times.
    """
    capacity = -(-array.size // link.size)  # equal shards, the last ones filled up
    whole = np.zeros(capacity * link.size, array.dtype)
    if link.rank == root:
        whole[: array.size] = array
    parts = [whole[rank * capacity : (rank + 1) * capacity] for rank in range(link.size)]
    tree_scatter(link, parts[link.rank], parts, root)
    bruck_link(link, parts, parts[link.rank])
    array[:] = whole[: array.size]


def chunked_tree_link(link: Link, array: Array, root: int) -> None:
    """The array follows a binomial tree in chunks: a rank sends a chunk on while it receives the next one.

    Steps: log2 size and the number of chunks, and the arrival. (size - 1) messages a chunk, the fewest; the root sends
    its bytes log2 size times.
    """
    link.arrive()
    place = (link.rank - root) % link.size
    reach = place & -place or link.size
    children = [
        (link.rank + distance) % link.size
        for distance in reversed(distances(link.size))
        if distance < reach and place + distance < link.size
    ]
    chunk_bytes = min(max(array.nbytes // _CHUNKS, CHUNK_BYTES), _MAX_CHUNKS * CHUNK_BYTES)
    parts = [as_bytes(array[chunk]) for chunk in chunks(array.size, chunk_bytes // array.itemsize)]
    parent = (link.rank - reach) % link.size

    def receive(number: int) -> Exchange:
        return link.start([], [(parent, parts[number])] if place else [])

    def send(number: int) -> Exchange:
        return link.start([(child, parts[number]) for child in children], [])

    for exchange in [send(number) for number in pipelined(link, len(parts), receive)]:
        link.finish(exchange)
