"""Overlay of the ranks of a world or a group: which pairs are connected from the start, the others only on demand.

Each rank has neighbours at distances 1, 4, 16 … in both directions: some log2 N of them. What concerns all ranks
reaches each in about log2 N hops, and a rank that dies is noticed by its neighbours, whoever talks to it.
"""

from __future__ import annotations

_FACTOR = 4
"""Ratio of consecutive distances."""


def partners(rank: int, size: int, full_mesh: int) -> list[int]:
    """Return the ranks whose addresses a rank gets at the join, in order: its neighbours and all at distances 1, 2, 4 …

    With the latter, dissemination, binomial trees and recursive doubling exchange bytes.
    """
    return neighbours(rank, size, full_mesh, factor=2)


def neighbours(rank: int, size: int, full_mesh: int, factor: int = _FACTOR) -> list[int]:
    """Return the neighbours of a rank among ``size``, in order; up to ``full_mesh`` ranks, all are. It is symmetric."""
    if size <= full_mesh:
        return [*range(rank), *range(rank + 1, size)]
    found, distance = set[int](), 1
    while distance < size:
        found |= {(rank + distance) % size, (rank - distance) % size}
        distance *= factor
    return sorted(found - {rank})
