"""The one table that picks an algorithm: (collective, medium) → by bytes a rank contributes and ranks in the group.

Here are the algorithms, from the one for the smallest arrays to the one for any, and how much each can take at all;
from where on the next one is faster was measured and is in ``limits``.
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
from rankmesh_agent.collectives.hierarchical import reduce as reduce_hosts
from rankmesh_agent.collectives.hierarchical import reduce_scatter as reduce_scatter_hosts
from rankmesh_agent.collectives.thresholds import LIMITS
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import OpType

Medium = Literal["segment", "reads", "registered", "link", "hosts"]
"""What a group communicates over: shared memory; the same where the ranks can also read each other's own memory; the
same with registered arrays; messages; messages between hosts, and shared memory inside them."""
Algorithm = Callable[..., None]

_ALWAYS = math.inf
_SLOT = -1.0
"""The bytes of a slot of the group's shared memory, whatever they are."""
_DIRECT: tuple[Medium, Medium] = ("reads", "registered")
_TABLE: dict[tuple[OpType, Medium], tuple[tuple[float, Algorithm], ...]] = {
    # Reducing everything everywhere costs size times the additions, but one step less: worth it in the L2 cache.
    (OpType.ALL_REDUCE, "segment"): ((_SLOT, all_reduce.small_segment), (_ALWAYS, all_reduce.chunked_segment)),
    (OpType.ALL_REDUCE, "link"): (
        (SMALL, all_reduce.small_link),
        (SMALL, all_reduce.star_link),
        (_ALWAYS, all_reduce.halving_link),
        (_ALWAYS, all_reduce.ring_link),
        (_ALWAYS, all_reduce.direct_link),
    ),
    (OpType.REDUCE, "segment"): ((_SLOT, reduce.small_segment), (_ALWAYS, reduce.chunked_segment)),
    # What is registered needs no copies, and where nothing is reduced the copy into a slot can be saved anyway.
    **{
        (kind, medium): ((_ALWAYS, short), (_ALWAYS, direct))
        for kind, short, direct in (
            (OpType.BROADCAST, broadcast.over_segment, broadcast.direct_segment),
            (OpType.ALL_GATHER, all_gather.over_segment, all_gather.direct_segment),
            (OpType.GATHER, gather.over_segment, gather.direct_segment),
            (OpType.SCATTER, scatter.over_segment, scatter.direct_segment),
            (OpType.REDUCE_SCATTER, reduce_scatter.over_segment, reduce_scatter.direct_segment),
        )
        for medium in _DIRECT
    },
    (OpType.ALL_REDUCE, "registered"): ((_SLOT, all_reduce.small_segment), (_ALWAYS, all_reduce.registered_segment)),
    (OpType.REDUCE, "registered"): ((_SLOT, reduce.small_segment), (_ALWAYS, reduce.registered_segment)),
    (OpType.REDUCE, "link"): ((SMALL, reduce.small_link), (_ALWAYS, reduce.direct_link)),
    (OpType.BROADCAST, "segment"): ((_ALWAYS, broadcast.over_segment),),
    (OpType.BROADCAST, "link"): ((SMALL, broadcast.small_link), (_ALWAYS, broadcast.scatter_link)),
    (OpType.ALL_GATHER, "segment"): ((_ALWAYS, all_gather.over_segment),),
    (OpType.ALL_GATHER, "link"): ((SMALL, all_gather.small_link), (_ALWAYS, all_gather.direct_link)),
    (OpType.GATHER, "segment"): ((_ALWAYS, gather.over_segment),),
    (OpType.GATHER, "link"): ((SMALL, gather.small_link), (_ALWAYS, gather.direct_link)),
    (OpType.SCATTER, "segment"): ((_ALWAYS, scatter.over_segment),),
    (OpType.SCATTER, "link"): ((SMALL, scatter.small_link), (_ALWAYS, scatter.direct_link)),
    (OpType.REDUCE_SCATTER, "segment"): ((_ALWAYS, reduce_scatter.over_segment),),
    (OpType.REDUCE_SCATTER, "link"): ((SMALL, reduce_scatter.small_link), (_ALWAYS, reduce_scatter.direct_link)),
    (OpType.ALL_TO_ALL, "segment"): ((_ALWAYS, all_to_all.over_segment),),
    (OpType.ALL_TO_ALL, "link"): ((_ALWAYS, all_to_all.over_link),),
    (OpType.BARRIER, "segment"): ((_ALWAYS, barrier.over_segment),),
    (OpType.BARRIER, "link"): ((_ALWAYS, barrier.direct_link), (_ALWAYS, barrier.star_link)),
    # What is different for every rank has to pass between hosts in any case: that goes over the link alone.
    (OpType.ALL_REDUCE, "hosts"): ((SMALL, all_reduce.small_link), (_ALWAYS, all_reduce_hosts.over_hosts)),
    (OpType.REDUCE, "hosts"): ((SMALL, reduce.small_link), (_ALWAYS, reduce_hosts.over_hosts)),
    (OpType.BROADCAST, "hosts"): ((SMALL, broadcast.small_link), (_ALWAYS, broadcast_hosts.over_hosts)),
    (OpType.ALL_GATHER, "hosts"): ((SMALL, all_gather.small_link), (_ALWAYS, all_gather_hosts.over_hosts)),
    (OpType.REDUCE_SCATTER, "hosts"): ((SMALL, reduce_scatter.small_link), (_ALWAYS, reduce_scatter_hosts.over_hosts)),
}

OVER_HOSTS: frozenset[Algorithm] = frozenset(rows[-1][1] for (_, medium), rows in _TABLE.items() if medium == "hosts")
"""The algorithms that take a Hosts; the others for a group on several hosts take its Link."""


def algorithm(kind: OpType, medium: Medium, nbytes: int, size: int, slot_bytes: int | None = None) -> Algorithm:
    """Return the algorithm for a call.

    Args:
        kind: the collective.
        medium: what the group communicates over.
        nbytes: bytes each rank contributes.
        size: ranks in the group.
        slot_bytes: bytes of a segment's slot: the algorithms for small arrays need it all at once.
    """
    rows = _rows(kind, medium, size, slot_bytes)
    return next((found for limit, found in rows[:-1] if nbytes <= limit), rows[-1][1])


def algorithms() -> list[tuple[OpType, Medium, Algorithm]]:
    """Return every algorithm the table can pick, for tests and benchmarks."""
    return [(kind, medium, found) for (kind, medium), rows in _TABLE.items() for _, found in rows]


def table_row(kind: OpType, medium: Medium) -> Medium:
    """Return whose row of the table a medium takes: its own, or the simpler one's it is a kind of."""
    return medium if (kind, medium) in _TABLE else "link" if medium == "hosts" else "segment"


def candidates(kind: OpType, medium: Medium, slot_bytes: int | None = None) -> tuple[tuple[float, Algorithm], ...]:
    """Return the algorithms for a collective in the table's order, each with the bytes it can take at all."""
    slot = math.inf if slot_bytes is None else slot_bytes
    row = _TABLE[kind, table_row(kind, medium)]
    return tuple((slot if capable is _SLOT else capable, found) for capable, found in row)


@cache
def _rows(kind: OpType, medium: Medium, size: int, slot_bytes: int | None) -> tuple[tuple[float, Algorithm], ...]:
    """Return the row of the table with its limits as they were measured."""
    measured = LIMITS.get((kind.name, table_row(kind, medium)), {})
    return tuple(
        (min(capable, _for_size(measured[found.__name__], size)) if found.__name__ in measured else capable, found)
        for capable, found in candidates(kind, medium, slot_bytes)
    )


def _for_size(limits: Mapping[int, int], size: int) -> int:
    """Return the limit for the largest group measured that is not larger than this one, else for the smallest."""
    return limits[max((measured for measured in limits if measured <= size), default=min(limits))]
