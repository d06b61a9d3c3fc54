"""The one table that picks an algorithm: (collective, medium) → by bytes a rank contributes."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import Kind

Medium = Literal["segment", "link", "hosts"]
Algorithm = Callable[..., None]

_ALWAYS = math.inf
_FLAT = 1 << 14
"""Bytes up to which ranks on several hosts take no notice of who shares a host: one message is all they wait for."""
_TABLE: dict[tuple[Kind, Medium], tuple[tuple[float, Algorithm], ...]] = {
    # Reducing everything everywhere costs size times the additions, but one step less: worth it in the L2 cache.
    (Kind.ALL_REDUCE, "segment"): ((1 << 17, all_reduce.small_segment), (_ALWAYS, all_reduce.chunked_segment)),
    (Kind.ALL_REDUCE, "link"): ((SMALL, all_reduce.small_link), (_ALWAYS, all_reduce.direct_link)),
    (Kind.REDUCE, "segment"): ((1 << 17, reduce.small_segment), (_ALWAYS, reduce.chunked_segment)),
    (Kind.REDUCE, "link"): ((SMALL, reduce.small_link), (_ALWAYS, reduce.direct_link)),
    (Kind.BROADCAST, "segment"): ((_ALWAYS, broadcast.over_segment),),
    (Kind.BROADCAST, "link"): ((SMALL, broadcast.small_link), (_ALWAYS, broadcast.scatter_link)),
    (Kind.ALL_GATHER, "segment"): ((_ALWAYS, all_gather.over_segment),),
    (Kind.ALL_GATHER, "link"): ((SMALL, all_gather.small_link), (_ALWAYS, all_gather.direct_link)),
    (Kind.GATHER, "segment"): ((_ALWAYS, gather.over_segment),),
    (Kind.GATHER, "link"): ((SMALL, gather.small_link), (_ALWAYS, gather.direct_link)),
    (Kind.SCATTER, "segment"): ((_ALWAYS, scatter.over_segment),),
    (Kind.SCATTER, "link"): ((SMALL, scatter.small_link), (_ALWAYS, scatter.direct_link)),
    (Kind.REDUCE_SCATTER, "segment"): ((_ALWAYS, reduce_scatter.over_segment),),
    (Kind.REDUCE_SCATTER, "link"): ((SMALL, reduce_scatter.small_link), (_ALWAYS, reduce_scatter.direct_link)),
    (Kind.ALL_TO_ALL, "segment"): ((_ALWAYS, all_to_all.over_segment),),
    (Kind.ALL_TO_ALL, "link"): ((_ALWAYS, all_to_all.over_link),),
    (Kind.BARRIER, "segment"): ((_ALWAYS, barrier.over_segment),),
    (Kind.BARRIER, "link"): ((_ALWAYS, barrier.over_link),),
    (Kind.ALL_REDUCE, "hosts"): ((_FLAT, all_reduce.small_link), (_ALWAYS, all_reduce_hosts.over_hosts)),
    (Kind.REDUCE, "hosts"): ((_FLAT, reduce.small_link), (_ALWAYS, reduce_hosts.over_hosts)),
    (Kind.BROADCAST, "hosts"): ((_FLAT, broadcast.small_link), (_ALWAYS, broadcast_hosts.over_hosts)),
    (Kind.ALL_GATHER, "hosts"): ((_FLAT, all_gather.small_link), (_ALWAYS, all_gather_hosts.over_hosts)),
    (Kind.GATHER, "hosts"): ((SMALL, gather.small_link), (_ALWAYS, gather.direct_link)),
    (Kind.SCATTER, "hosts"): ((SMALL, scatter.small_link), (_ALWAYS, scatter.direct_link)),
    (Kind.REDUCE_SCATTER, "hosts"): ((_FLAT, reduce_scatter.small_link), (_ALWAYS, reduce_scatter_hosts.over_hosts)),
    (Kind.ALL_TO_ALL, "hosts"): ((_ALWAYS, all_to_all.over_link),),
    (Kind.BARRIER, "hosts"): ((_ALWAYS, barrier.over_link),),
}


def algorithm(kind: Kind, medium: Medium, nbytes: int, slot_bytes: int | None = None) -> Algorithm:
    """Return the algorithm for a call.

    Args:
        kind: the collective.
        medium: what the group communicates over.
        nbytes: bytes each rank contributes.
        slot_bytes: bytes of a segment's slot: the algorithms for small arrays need it all at once.
    """
    rows = _TABLE[kind, medium]
    for limit, found in rows[:-1]:
        if nbytes <= limit and (slot_bytes is None or nbytes <= slot_bytes):
            return found
    return rows[-1][1]


def algorithms() -> list[tuple[Kind, Medium, Algorithm]]:
    """Return every algorithm the table can pick, for tests and benchmarks."""
    return [(kind, medium, found) for (kind, medium), rows in _TABLE.items() for _, found in rows]
