"""Selection of a call's algorithm by collective, medium, bytes that a rank contributes, and group size.

The table lists the algorithms from the one for the smallest arrays to the one for any array, and the most bytes that
each can take. ``thresholds`` has the measured sizes from which the next algorithm is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

from rankmesh_agent.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from rankmesh_agent.collectives.hierarchical import all_gather as all_gather_hosts
from rankmesh_agent.collectives.hierarchical import all_reduce as all_reduce_hosts
from rankmesh_agent.collectives.hierarchical import broadcast as broadcast_hosts
from rankmesh_agent.collectives.hierarchical import leaders
from rankmesh_agent.collectives.hierarchical import reduce as reduce_hosts
from rankmesh_agent.collectives.hierarchical import reduce_scatter as reduce_scatter_hosts
from rankmesh_agent.collectives.model import seconds
from rankmesh_agent.collectives.thresholds import LIMITS, MEASURED_BYTES, MEASURED_RANKS
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import OpType

Medium = Literal["segment", "reads", "registered", "link", "hosts"]
"""Medium of a group: shared memory; shared memory where the ranks can also read each other's private memory; the same
with registered arrays; messages; messages between hosts, and shared memory inside each host."""
Algorithm = Callable[..., None]

_ANY = math.inf
_LANE = -2.0
"""Stands for the size of a slot divided by the number of ranks, in bytes."""
_SLOT = -1.0
"""Stands for the size of a slot of the group's shared memory, in bytes."""
_DIRECT: tuple[Medium, Medium] = ("reads", "registered")
_TABLE: dict[tuple[OpType, Medium], tuple[tuple[float, Algorithm], ...]] = {
    # A reduction of all arrays at every rank takes size times the additions, but one step less: faster in the L2 cache.
    (OpType.ALL_REDUCE, "segment"): ((_SLOT, all_reduce.small_segment), (_ANY, all_reduce.chunked_segment)),
    (OpType.ALL_REDUCE, "link"): (
        (SMALL, all_reduce.small_link),
        (SMALL, all_reduce.star_link),
        (_ANY, all_reduce.doubling_link),
        (_ANY, all_reduce.halving_link),
        (_ANY, all_reduce.ring_link),
        (_ANY, all_reduce.direct_link),
    ),
    (OpType.REDUCE, "segment"): ((_SLOT, reduce.small_segment), (_ANY, reduce.chunked_segment)),
    # Registered arrays need no copies, and calls without a reduction need no copy into a slot in any case.
    **{
        (kind, medium): ((_ANY, short), (_ANY, direct))
        for kind, short, direct in (
            (OpType.BROADCAST, broadcast.over_segment, broadcast.direct_segment),
            (OpType.ALL_GATHER, all_gather.over_segment, all_gather.direct_segment),
            (OpType.GATHER, gather.over_segment, gather.direct_segment),
            (OpType.SCATTER, scatter.over_segment, scatter.direct_segment),
            (OpType.REDUCE_SCATTER, reduce_scatter.over_segment, reduce_scatter.direct_segment),
        )
        for medium in _DIRECT
    },
    (OpType.ALL_REDUCE, "registered"): ((_SLOT, all_reduce.small_segment), (_ANY, all_reduce.registered_segment)),
    (OpType.REDUCE, "registered"): ((_SLOT, reduce.small_segment), (_ANY, reduce.registered_segment)),
    (OpType.REDUCE, "link"): (
        (SMALL, reduce.small_link),
        (SMALL, reduce.star_link),
        (_ANY, reduce.tree_link),
        (_ANY, reduce.all_reduce_link),
        (_ANY, reduce.direct_link),
    ),
    (OpType.BROADCAST, "segment"): ((_ANY, broadcast.over_segment),),
    (OpType.BROADCAST, "link"): (
        (SMALL, broadcast.small_link),
        (SMALL, broadcast.star_link),
        (_ANY, broadcast.tree_link),
        (_ANY, broadcast.scatter_link),
    ),
    (OpType.ALL_GATHER, "segment"): ((_ANY, all_gather.over_segment),),
    (OpType.ALL_GATHER, "link"): (
        (SMALL / MEASURED_RANKS, all_gather.star_link),
        (SMALL, all_gather.small_link),
        (_ANY, all_gather.bruck_link),
        (_ANY, all_gather.ring_link),
        (_ANY, all_gather.direct_link),
    ),
    (OpType.GATHER, "segment"): ((_ANY, gather.over_segment),),
    (OpType.GATHER, "link"): (
        (SMALL, gather.small_link),
        (SMALL, gather.star_link),
        (_ANY, gather.tree_link),
        (_ANY, gather.direct_link),
    ),
    (OpType.SCATTER, "segment"): ((_ANY, scatter.over_segment),),
    (OpType.SCATTER, "link"): (
        (SMALL, scatter.small_link),
        (SMALL, scatter.star_link),
        (_ANY, scatter.tree_link),
        (_ANY, scatter.direct_link),
    ),
    (OpType.REDUCE_SCATTER, "segment"): ((_ANY, reduce_scatter.over_segment),),
    (OpType.REDUCE_SCATTER, "link"): (
        (SMALL, reduce_scatter.small_link),
        (_ANY, reduce_scatter.doubling_link),
        (_ANY, reduce_scatter.ring_link),
        (_ANY, reduce_scatter.direct_link),
    ),
    (OpType.ALL_TO_ALL, "segment"): ((_ANY, all_to_all.over_segment),),
    (OpType.ALL_TO_ALL, "link"): ((_ANY, all_to_all.over_link), (_ANY, all_to_all.bruck_link)),
    (OpType.BARRIER, "segment"): ((_ANY, barrier.over_segment),),
    (OpType.BARRIER, "link"): ((_ANY, barrier.over_link),),
    # Data that differs for every rank must cross between hosts in any case: these calls use only the link.
    (OpType.ALL_REDUCE, "hosts"): ((_SLOT, leaders.all_reduce), (_ANY, all_reduce_hosts.over_hosts)),
    (OpType.REDUCE, "hosts"): ((_SLOT, leaders.reduce), (_ANY, reduce_hosts.over_hosts)),
    (OpType.BROADCAST, "hosts"): ((_SLOT, leaders.broadcast), (_ANY, broadcast_hosts.over_hosts)),
    (OpType.BARRIER, "hosts"): ((_ANY, leaders.barrier),),
    (OpType.ALL_GATHER, "hosts"): (
        (_LANE, leaders.all_gather),
        (SMALL, all_gather.small_link),
        (_ANY, all_gather_hosts.over_hosts),
    ),
    (OpType.REDUCE_SCATTER, "hosts"): (
        (_LANE, leaders.reduce_scatter),
        (SMALL, reduce_scatter.small_link),
        (_ANY, reduce_scatter_hosts.over_hosts),
    ),
}

HIERARCHICAL: frozenset[Algorithm] = frozenset(
    found
    for (_, medium), rows in _TABLE.items()
    if medium == "hosts"
    for _, found in rows
    if ".hierarchical." in found.__module__
)
"""Algorithms that take a HierarchicalLink; the other algorithms of a group on several hosts take its Link."""


def algorithm(kind: OpType, medium: Medium, nbytes: int, size: int, slot_bytes: int | None = None) -> Algorithm:
    """Return the algorithm for a call.

    Args:
        kind: the collective.
        medium: medium of the group.
        nbytes: bytes each rank contributes.
        size: ranks in the group.
        slot_bytes: bytes of a segment's slot; the algorithms for small arrays need it for the whole array.
    """
    row = table_row(kind, medium)
    if row == "link" and size > MEASURED_RANKS:
        able = [found for limit, found in candidates(kind, medium) if nbytes <= limit]
        return min(able, key=lambda found: seconds(found, medium, nbytes, size))
    rows = _rows(kind, medium, size, slot_bytes)
    measured = min(nbytes, MEASURED_BYTES) if row == "link" else nbytes  # what is best for the most is so for more
    return next((found for limit, found in rows[:-1] if measured <= limit), rows[-1][1])


def algorithms() -> list[tuple[OpType, Medium, Algorithm]]:
    """Return every algorithm of the table, for tests and benchmarks."""
    return [(kind, medium, found) for (kind, medium), rows in _TABLE.items() for _, found in rows]


def table_row(kind: OpType, medium: Medium) -> Medium:
    """Return the medium whose row of the table applies: the medium itself, or the simpler one that it extends."""
    return medium if (kind, medium) in _TABLE else "link" if medium == "hosts" else "segment"


def candidates(
    kind: OpType, medium: Medium, slot_bytes: int | None = None, size: int = 1
) -> tuple[tuple[float, Algorithm], ...]:
    """Return the algorithms for a collective in the table's order, each with the most bytes that it can take."""
    slot = math.inf if slot_bytes is None else slot_bytes
    most = {_SLOT: slot, _LANE: slot / size}
    return tuple((most.get(capable, capable), found) for capable, found in _TABLE[kind, table_row(kind, medium)])


@cache
def _rows(kind: OpType, medium: Medium, size: int, slot_bytes: int | None) -> tuple[tuple[float, Algorithm], ...]:
    """Return the row of the table with its measured thresholds."""
    measured = LIMITS.get((kind.name, table_row(kind, medium)), {})
    return tuple(
        (min(capable, _for_size(measured[found.__name__], size)) if found.__name__ in measured else capable, found)
        for capable, found in candidates(kind, medium, slot_bytes, size)
    )


def _for_size(limits: Mapping[int, int], size: int) -> int:
    """Return the threshold of the largest measured group not larger than this one, else that of the smallest."""
    return limits[max((measured for measured in limits if measured <= size), default=min(limits))]
