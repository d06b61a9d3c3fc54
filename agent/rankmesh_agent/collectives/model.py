"""Cost model of the algorithms over messages, for more ranks than were measured.

An algorithm's time is that of the messages that follow one another at the busiest rank: each takes a start-up time, and
each byte a time in addition (the alpha-beta model of Hockney, 1994). ``thresholds`` has both, by medium.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.collectives.thresholds import SECONDS_A_BYTE, START_UP_SECONDS
from rankmesh_agent.wire.frames import SMALL

_COPY = 0.5
"""Time to copy a byte in memory, as a part of the time to send it."""


class Cost(NamedTuple):
    """Messages that follow one another at the busiest rank, and their bytes."""

    messages: float
    nbytes: float


def _to_all(nbytes: int, size: int) -> Cost:
    """One message to or from every other rank; for few ranks."""
    return Cost(size - 1 if size <= FEW_RANKS else math.inf, (size - 1) * nbytes)


def _star(nbytes: int, size: int) -> Cost:
    """One message to and from every other rank at the root; for few ranks."""
    return Cost(2 * (size - 1) if size <= FEW_RANKS else math.inf, 2 * (size - 1) * nbytes)


def _tree(nbytes: int, size: int) -> Cost:
    """The whole array in every step of a tree."""
    return Cost(_steps(size) + _arrival(nbytes, size), _steps(size) * nbytes)


def _tree_of_all(nbytes: int, size: int) -> Cost:
    """The arrays of all ranks over a tree, which copies them at each rank."""
    return Cost(_steps(size) + _arrival(nbytes * size, size), (1 + _COPY) * (size - 1) * nbytes)


def _doubling(nbytes: int, size: int) -> Cost:
    steps = _folded(size)
    return Cost(steps + _arrival(nbytes, size), steps * nbytes)


def _halving(nbytes: int, size: int) -> Cost:
    power = size & (size - 1) == 0
    if not power and size <= FEW_RANKS:
        return _direct_shards(nbytes, size)
    nbytes_moved = 2 * nbytes * (size - 1) / size + (0 if power else 2 * nbytes)
    return Cost(_steps(size) + 2 * _folded(size), nbytes_moved)


def _direct_shards(nbytes: int, size: int) -> Cost:
    """A shard to every other rank, and back."""
    return Cost(2 * _to_all(0, size).messages + _steps(size), 2 * nbytes * (size - 1) / size)


def _ring(nbytes: int, size: int) -> Cost:
    return Cost(2 * (size - 1) + _steps(size), 2 * nbytes * (size - 1) / size)


def _scatter_gather(nbytes: int, size: int) -> Cost:
    if size <= FEW_RANKS:
        return _direct_shards(nbytes, size)
    return Cost(4 * _steps(size), 2 * nbytes * (size - 1) / size)


def _doubling_of_all(nbytes: int, size: int) -> Cost:
    return _doubling(nbytes * size, size)


def _ring_of_all(nbytes: int, size: int) -> Cost:
    return Cost(size - 1 + _steps(size), (size - 1) * nbytes)


def _direct_of_all(nbytes: int, size: int) -> Cost:
    return Cost(_to_all(0, size).messages + _steps(size), (size - 1) * nbytes)


def _direct_rooted(nbytes: int, size: int) -> Cost:
    """A message between the root and every other rank, however many, for arrays too long for copies."""
    return Cost(size - 1 + _steps(size), (size - 1) * nbytes)


def _lengths_first(nbytes: int, size: int) -> Cost:
    return Cost(3 * _steps(size), (size - 1) * nbytes)


def _arrive(nbytes: int, size: int) -> Cost:
    return Cost(_steps(size), 0)


def _steps(size: int) -> int:
    """Return the steps of a tree."""
    return (size - 1).bit_length()


def _folded(size: int) -> int:
    """Return the steps of recursive doubling, with those for numbers of ranks that are no power of two."""
    return size.bit_length() - 1 + (0 if size & (size - 1) == 0 else 2)


def _arrival(nbytes: int, size: int) -> int:
    """Return the steps of the arrival before messages of so many bytes."""
    return _steps(size) if nbytes > SMALL else 0


COSTS: dict[str, Callable[[int, int], Cost]] = {
    "all_gather.bruck_link": _tree_of_all,
    "all_gather.direct_link": _direct_of_all,
    "all_gather.ring_link": _ring_of_all,
    "all_gather.small_link": _to_all,
    "all_gather.star_link": _star,
    "all_reduce.direct_link": _direct_shards,
    "all_reduce.doubling_link": _doubling,
    "all_reduce.halving_link": _halving,
    "all_reduce.ring_link": _ring,
    "all_reduce.small_link": _to_all,
    "all_reduce.star_link": _star,
    "all_to_all.bruck_link": _lengths_first,
    "all_to_all.over_link": _to_all,
    "barrier.over_link": _arrive,
    "broadcast.scatter_link": _scatter_gather,
    "broadcast.small_link": _to_all,
    "broadcast.star_link": _star,
    "broadcast.tree_link": _tree,
    "gather.direct_link": _direct_rooted,
    "gather.small_link": _to_all,
    "gather.star_link": _star,
    "gather.tree_link": _tree_of_all,
    "reduce.all_reduce_link": _halving,
    "reduce.direct_link": _direct_shards,
    "reduce.small_link": _to_all,
    "reduce.star_link": _star,
    "reduce.tree_link": _tree,
    "reduce_scatter.direct_link": _direct_of_all,
    "reduce_scatter.doubling_link": _doubling_of_all,
    "reduce_scatter.ring_link": _ring_of_all,
    "reduce_scatter.small_link": _to_all,
    "scatter.direct_link": _direct_rooted,
    "scatter.small_link": _to_all,
    "scatter.star_link": _star,
    "scatter.tree_link": _tree_of_all,
}
"""The costs of each algorithm, by its name, for the bytes that a rank contributes and the number of ranks."""


def seconds(algorithm: Callable[..., None], medium: str, nbytes: int, size: int) -> float:
    """Return the time of a call by an algorithm."""
    module = algorithm.__module__.partition(".collectives.")[2]
    cost = COSTS[f"{module}.{algorithm.__name__}"](nbytes, size)
    return cost.messages * START_UP_SECONDS[medium] + cost.nbytes * SECONDS_A_BYTE[medium]
