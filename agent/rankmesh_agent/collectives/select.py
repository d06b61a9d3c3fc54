"""Selection of a call's algorithm: one table by collective, medium, bytes that a rank contributes, and group size.

A call takes the first row of its collective and medium whose limit it does not exceed. Limits up to MEASURED_RANKS are
measured: ``python -m benchmarks.tune`` finds and prints them. Measured: 2026-11-21, those of 6 and 8 ranks over
messages 2026-11-23, that of scatter over reads 2026-11-28, on AMD EPYC, 2 cores, Linux 6.18.44-fc-v669. Those of
several hosts are older: a single host cannot measure them. Limits for more ranks over messages are calculated, not
measured: algorithms of log2 size steps for short arrays, of the fewest bytes for long ones, for 80 us a message and
0.35 ns a byte. From 17 ranks on, no rank addresses all others, except the root of long arrays of gather and scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from rankmesh_agent.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    hosts,
    leaders,
    reduce,
    reduce_scatter,
    scatter,
)
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import OpType

Medium = Literal["segment", "reads", "registered", "link", "hosts"]
"""Medium of a group: shared memory; shared memory where the ranks can also read each other's private memory; the same
with registered arrays; messages; messages between hosts, and shared memory inside each host."""
Algorithm = Callable[..., None]

MEASURED_RANKS = 12
"""The most ranks for which the algorithms over messages were measured."""
ANY = math.inf
NEVER = -1
_KIB, _MIB = 1 << 10, 1 << 20


class Row(NamedTuple):
    """An algorithm, and the calls that take it if they take none of an earlier row.

    Attributes:
        limits: the most bytes a rank, by the least number of ranks for which that holds; begins with 2 ranks.
        able: the most bytes that the algorithm can take; "slot" is a slot of the group's shared memory, "lane" that
            divided by the number of ranks.
        only: "shares_cores": only where ranks share cores (see Link).
    """

    algorithm: Algorithm
    limits: Mapping[int, float] = {2: ANY}
    able: float | Literal["slot", "lane"] = ANY
    only: Literal["", "shares_cores"] = ""

    def most(self, size: int, slot_bytes: int | None) -> float:
        """Return the most bytes that the algorithm can take in a group of ``size`` ranks."""
        if not isinstance(self.able, str):
            return self.able
        return ANY if slot_bytes is None else slot_bytes if self.able == "slot" else slot_bytes / size

    def limit(self, size: int) -> float:
        """Return the most bytes for which the algorithm is taken in a group of ``size`` ranks."""
        return self.limits[max((ranks for ranks in self.limits if ranks <= size), default=2)]


_HALVING = {2: NEVER, **{1 << bits: ANY for bits in range(5, 13)}}
"""Of numbers of ranks that are no power of two, some ranks send all their bytes in addition."""
_HALVING |= {(1 << bits) + 1: 256 * _KIB << bits for bits in range(4, 13)}

TABLE: dict[tuple[OpType, Medium], tuple[Row, ...]] = {
    # A reduction of all arrays at every rank takes size times the additions, but one step less: faster in the L2 cache.
    (OpType.ALL_REDUCE, "segment"): (
        Row(all_reduce.small_segment, {2: _MIB, 4: 128 * _KIB}, "slot"),
        Row(all_reduce.chunked_segment),
    ),
    (OpType.ALL_REDUCE, "registered"): (
        Row(all_reduce.small_segment, {2: _MIB, 4: 256 * _KIB}, "slot"),
        Row(all_reduce.registered_segment),
    ),
    (OpType.ALL_REDUCE, "link"): (
        Row(all_reduce.small_link, {2: SMALL, 4: 32 * _KIB, 6: NEVER}, SMALL),
        Row(all_reduce.star_link, {2: NEVER, 4: SMALL, 13: NEVER}, SMALL),
        Row(all_reduce.doubling_link, {2: NEVER, 13: 1536 * _KIB, 16: 512 * _KIB}),
        Row(all_reduce.direct_link, {2: ANY, 17: NEVER}),
        Row(all_reduce.halving_link, _HALVING),
        Row(all_reduce.ring_link),
    ),
    (OpType.ALL_REDUCE, "hosts"): (Row(leaders.all_reduce, {2: 64 * _KIB}, "slot"), Row(hosts.all_reduce)),
    (OpType.REDUCE, "segment"): (Row(reduce.small_segment, {2: _MIB}, "slot"), Row(reduce.chunked_segment)),
    (OpType.REDUCE, "registered"): (
        Row(reduce.small_segment, {2: _MIB, 4: 512 * _KIB}, "slot"),
        Row(reduce.registered_segment),
    ),
    (OpType.REDUCE, "link"): (
        Row(reduce.small_link, {2: SMALL, 6: NEVER}, SMALL),
        Row(reduce.star_link, {2: NEVER, 6: SMALL, 13: NEVER}, SMALL),
        Row(reduce.tree_link, {2: NEVER, 13: 2 * _MIB, 16: 512 * _KIB}),
        Row(reduce.direct_link, {2: ANY, 17: NEVER}),
        Row(reduce.all_reduce_link),
    ),
    (OpType.REDUCE, "hosts"): (Row(leaders.reduce, {2: 64 * _KIB}, "slot"), Row(hosts.reduce)),
    (OpType.BROADCAST, "segment"): (Row(broadcast.over_segment),),
    (OpType.BROADCAST, "reads"): (Row(broadcast.over_segment, {2: 8 * _MIB}), Row(broadcast.direct_segment)),
    # Registered arrays need no copies, and calls without a reduction need no copy into a slot in any case.
    (OpType.BROADCAST, "registered"): (
        Row(broadcast.over_segment, {2: 32 * _KIB, 4: 2 * _MIB}),
        Row(broadcast.direct_segment),
    ),
    (OpType.BROADCAST, "link"): (
        Row(broadcast.small_link, {2: SMALL, 6: NEVER}, SMALL),
        Row(broadcast.star_link, {2: NEVER, 6: SMALL, 13: NEVER}, SMALL),
        Row(broadcast.tree_link, {2: NEVER, 13: 2 * _MIB, 17: 640 * _KIB}),
        Row(broadcast.chunked_tree_link, {2: ANY, 17: NEVER}, only="shares_cores"),
        Row(broadcast.scatter_link, {2: ANY, 17: NEVER}),
        Row(broadcast.tree_scatter_link),
    ),
    (OpType.BROADCAST, "hosts"): (Row(leaders.broadcast, {2: 64 * _KIB}, "slot"), Row(hosts.broadcast)),
    (OpType.ALL_GATHER, "segment"): (Row(all_gather.over_segment),),
    (OpType.ALL_GATHER, "reads"): (
        Row(all_gather.over_segment, {2: 4 * _MIB, 4: 2 * _MIB}),
        Row(all_gather.direct_segment),
    ),
    (OpType.ALL_GATHER, "registered"): (
        Row(all_gather.over_segment, {2: 32 * _KIB, 4: 256 * _KIB}),
        Row(all_gather.direct_segment),
    ),
    (OpType.ALL_GATHER, "link"): (
        Row(all_gather.star_link, {2: NEVER, 6: 8 * _KIB, 13: NEVER}, SMALL // MEASURED_RANKS),
        Row(all_gather.small_link, {2: SMALL, 13: NEVER}, SMALL),
        Row(all_gather.bruck_link, {2: NEVER, 13: 384 * _KIB}),
        Row(all_gather.direct_link, {2: ANY, 13: NEVER}),
        Row(all_gather.ring_link),
    ),
    (OpType.ALL_GATHER, "hosts"): (
        Row(leaders.all_gather, {2: NEVER, 8: 16 * _KIB}, "lane"),
        Row(all_gather.small_link, {2: SMALL, 16: NEVER}, SMALL),
        Row(hosts.all_gather),
    ),
    (OpType.GATHER, "segment"): (Row(gather.over_segment),),
    (OpType.GATHER, "reads"): (Row(gather.over_segment, {2: 4 * _MIB, 4: 2 * _MIB}), Row(gather.direct_segment)),
    (OpType.GATHER, "registered"): (Row(gather.over_segment, {2: 4 * _MIB, 4: _MIB}), Row(gather.direct_segment)),
    # Data that differs for every rank must cross between hosts in any case: these calls use only the link.
    (OpType.GATHER, "link"): (
        Row(gather.small_link, {2: SMALL, 6: NEVER}, SMALL),
        Row(gather.star_link, {2: NEVER, 6: SMALL, 13: NEVER}, SMALL),
        Row(gather.tree_link, {2: NEVER, 13: 256 * _KIB}),
        Row(gather.direct_link),
    ),
    (OpType.SCATTER, "segment"): (Row(scatter.over_segment),),
    (OpType.SCATTER, "reads"): (
        Row(scatter.over_segment, {2: 2 * _MIB, 4: 512 * _KIB, 8: 256 * _KIB}),
        Row(scatter.direct_segment),
    ),
    (OpType.SCATTER, "registered"): (
        Row(scatter.over_segment, {2: 64 * _KIB, 4: 256 * _KIB}),
        Row(scatter.direct_segment),
    ),
    (OpType.SCATTER, "link"): (
        Row(scatter.small_link, {2: SMALL, 6: NEVER}, SMALL),
        Row(scatter.star_link, {2: NEVER, 6: SMALL, 13: NEVER}, SMALL),
        Row(scatter.tree_link, {2: NEVER, 13: 256 * _KIB}),
        Row(scatter.direct_link),
    ),
    (OpType.REDUCE_SCATTER, "segment"): (Row(reduce_scatter.over_segment),),
    (OpType.REDUCE_SCATTER, "reads"): (
        Row(reduce_scatter.over_segment, {2: 4 * _MIB, 4: 2 * _MIB}),
        Row(reduce_scatter.direct_segment),
    ),
    (OpType.REDUCE_SCATTER, "registered"): (
        Row(reduce_scatter.over_segment, {2: 64 * _KIB, 4: 32 * _KIB}),
        Row(reduce_scatter.direct_segment),
    ),
    (OpType.REDUCE_SCATTER, "link"): (
        Row(reduce_scatter.small_link, {2: SMALL, 13: NEVER}, SMALL),
        Row(reduce_scatter.doubling_link, {2: NEVER, 13: 32 * _KIB}),
        Row(reduce_scatter.direct_link, {2: ANY, 13: NEVER}),
        Row(reduce_scatter.ring_link),
    ),
    (OpType.REDUCE_SCATTER, "hosts"): (
        Row(leaders.reduce_scatter, {2: _KIB, 8: 16 * _KIB}, "lane"),
        Row(reduce_scatter.small_link, {2: SMALL, 16: NEVER}, SMALL),
        Row(hosts.reduce_scatter),
    ),
    (OpType.ALL_TO_ALL, "segment"): (Row(all_to_all.over_segment),),
    (OpType.ALL_TO_ALL, "link"): (Row(all_to_all.over_link, {2: ANY, 14: NEVER}), Row(all_to_all.bruck_link)),
    (OpType.BARRIER, "segment"): (Row(barrier.over_segment),),
    (OpType.BARRIER, "link"): (Row(barrier.over_link),),
    (OpType.BARRIER, "hosts"): (Row(leaders.barrier),),
}

HIERARCHICAL: frozenset[Algorithm] = frozenset(
    row.algorithm
    for (_, medium), rows in TABLE.items()
    if medium == "hosts"
    for row in rows
    if row.algorithm.__module__ in (hosts.__name__, leaders.__name__)
)
"""Algorithms that take a HierarchicalLink; the other algorithms of a group on several hosts take its Link."""


def algorithm(
    kind: OpType, medium: Medium, nbytes: int, size: int, slot_bytes: int | None = None, *, shares_cores: bool = False
) -> Algorithm:
    """Return the algorithm for a call."""
    return next(
        row.algorithm
        for row in rows_of(kind, medium)
        if (shares_cores or not row.only) and nbytes <= min(row.limit(size), row.most(size, slot_bytes))
    )


def name_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm of the table, as docs/algorithms.md has it; empty for any other function."""
    module = getattr(algorithm, "__module__", "").rpartition(".")
    if module[0] != __name__.rpartition(".")[0]:
        return ""
    return f"{module[2]}.{algorithm.__name__}" if algorithm in HIERARCHICAL else algorithm.__name__


def algorithms(
    kind: OpType, medium: Medium, slot_bytes: int | None = None, size: int = 1
) -> list[tuple[float, Algorithm]]:
    """Return the algorithms of a collective in the table's order, each after the most bytes that it can take."""
    return [(row.most(size, slot_bytes), row.algorithm) for row in rows_of(kind, medium)]


def rows_of(kind: OpType, medium: Medium) -> tuple[Row, ...]:
    """Return the rows of a collective for a medium, else those of the simpler medium that it extends."""
    return TABLE.get((kind, medium)) or TABLE[kind, "link" if medium == "hosts" else "segment"]
