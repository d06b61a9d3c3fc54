"""Rounds of the algorithms whose ranks exchange messages at doubling distances: log2 size rounds, one message in each.

In every round each rank sends to the rank at one distance and receives from the rank at the same distance the other
way. The edges contain a binomial tree with any root, by which payloads travel; the other messages are empty. After the
last round each rank has heard from all, as after a dissemination, so the rounds of short payloads are the arrival, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array, Link, as_bytes
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

Payload = memoryview | bytes
Merge = Callable[[Payload, Payload], Payload]
"""Combines the payloads of two groups of ranks; the first has the lower ranks."""


def distances(size: int) -> list[int]:
    """Return the powers of two below ``size``."""
    return [1 << bit for bit in range((size - 1).bit_length())]


class Rounds:
    """The rounds of one call, whose first one is the arrival.

    Args:
        most: bytes of the longest message in any round, equal at all ranks. If they are more than frames.SMALL, or
            ranks share cores, the arrival comes before, and only messages that are not empty are sent.
    """

    def __init__(self, link: Link, most: int) -> None:
        self._link = link
        self._short = most <= SMALL and not link.shares_cores
        if not self._short:
            link.arrive()

    def step(self, to: int | None, payload: Payload, source: int | None, nbytes: int) -> Payload:
        """Send to one rank and receive ``nbytes`` from one rank; see Link.step."""
        if self._short:
            return self._link.step(to, payload, source)
        received = np.empty(nbytes, np.uint8).data
        self._link.exchange(
            [] if to is None else [(to, memoryview(payload))], [] if source is None else [(source, received)]
        )
        return received

    def shift(self, distance: int, payload: Payload, nbytes: int) -> Payload:
        """Send to the rank at a distance ahead, and receive ``nbytes`` from the rank as far behind."""
        link = self._link
        return self.step((link.rank + distance) % link.size, payload, (link.rank - distance) % link.size, nbytes)


def allreduce_bytes(link: Link, payload: Payload, merge: Merge, most: int = 0) -> Payload:
    """Merge the payloads of all ranks, in the order of a tree that is the same at all ranks (recursive doubling).

    Of numbers of ranks that are no power of two, the first ranks merge in pairs before, and share the result after.

    Steps: log2 size, and 2 if size is no power of two. Each rank sends its bytes in each.

    Args:
        most: bytes of every payload; at most frames.SMALL if they differ.
    """
    if link.shares_cores and most <= SMALL:
        return allreduce_bytes_by_tree(link, payload, merge)
    rank, size = link.rank, link.size
    rounds = Rounds(link, most)
    power = 1 << (size.bit_length() - 1)
    paired = size - power  # pairs among the first ranks; the upper one of each takes part in the rounds
    lower, upper = rank < 2 * paired and not rank % 2, rank < 2 * paired and bool(rank % 2)
    if paired:
        received = rounds.step(rank + 1 if lower else None, payload, rank - 1 if upper else None, most)
        if upper:
            payload = merge(received, payload)
    place = rank // 2 if upper else rank - paired
    for distance in distances(power):
        if lower:
            rounds.step(None, b"", None, 0)
            continue
        partner = place ^ distance
        other = 2 * partner + 1 if partner < paired else partner + paired
        received = rounds.step(other, payload, other, most)
        payload = merge(received, payload) if partner < place else merge(payload, received)
    if paired:
        received = rounds.step(rank - 1 if upper else None, payload, rank + 1 if lower else None, most)
        if lower:
            payload = received
    return payload


def allreduce_bytes_by_tree(link: Link, payload: Payload, merge: Merge) -> Payload:
    """Merge the payloads of all ranks at rank 0, along a binomial tree, and send the result back.

    Steps: 2 log2 size. Each rank sends its bytes once, and those of the result log2 size times at most: the fewest
    messages, 2 (size - 1) in total.
    """
    rank, size = link.rank, link.size
    for distance in distances(size):
        sends = rank % (2 * distance) == distance
        receives = rank % (2 * distance) == 0 and rank + distance < size
        received = link.step(rank - distance if sends else None, payload, rank + distance if receives else None)
        if receives:
            payload = merge(payload, received)
    for distance in reversed(distances(size)):
        sends = rank % (2 * distance) == 0 and rank + distance < size
        receives = rank % (2 * distance) == distance
        received = link.step(rank + distance if sends else None, payload, rank - distance if receives else None)
        if receives:
            payload = received
    return payload


def reduce_by_doubling(link: Link, array: Array, op: ReduceOp) -> None:
    """Reduce an array over all ranks in the order of ``allreduce_bytes``."""
    total = to_partials(array, op, partial_dtype(op, array.dtype, link.size))
    combine_partials(op, [allreduce_partials(link, total, op)], link.size, array)


def allreduce_partials(link: Link, total: Array, op: ReduceOp) -> Array:
    """Return the partial result of all ranks; see ``allreduce_bytes``."""

    def merged(lower: Payload, upper: Payload) -> Payload:
        result = np.empty_like(total)
        combine_to_partial(op, [np.frombuffer(part, np.uint8).view(total.dtype) for part in (lower, upper)], result)
        return as_bytes(result)

    return np.frombuffer(allreduce_bytes(link, as_bytes(total), merged, total.nbytes), np.uint8).view(total.dtype)


def to_partials(array: Array, op: ReduceOp, dtype: np.dtype[Any]) -> Array:
    """Return an array as partial results: itself if its dtype is theirs."""
    if dtype == array.dtype:
        return array
    wide = np.empty(array.size, dtype)
    combine_to_partial(op, [array], wide)
    return wide


def transpose(link: Link, rows: Array) -> Array:
    """Send row k to rank k, for all k; return the rows from all ranks, by rank (Bruck's algorithm).

    Steps: log2 size, twice that for messages of more than frames.SMALL bytes. Each rank sends half the rows in each.
    """
    rank, size = link.rank, link.size
    moved = [[place for place in range(size) if place & distance] for distance in distances(size)]
    rounds = Rounds(link, max(map(len, moved)) * rows.shape[1])
    blocks = np.roll(rows, -rank, 0)  # for the rank at each distance ahead
    for distance, places in zip(distances(size), moved, strict=True):
        received = rounds.shift(distance, blocks[places].tobytes(), len(places) * rows.shape[1])
        blocks[places] = np.frombuffer(received, np.uint8).reshape(len(places), -1)
    return np.roll(blocks[::-1], rank + 1, 0)  # from the rank at each distance behind
