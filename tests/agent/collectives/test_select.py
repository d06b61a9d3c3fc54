"""The table that picks algorithms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.in_memory import MemoryWorld

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives import all_gather, all_reduce, broadcast, gather, reduce, reduce_scatter, scatter
from rankmesh_agent.collectives.link import chunks, shards
from rankmesh_agent.collectives.select import ANY, NEVER, TABLE, algorithm, algorithms, rows_of
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import Call, OpType

COLLECTIVES = sorted(set(OpType) - {OpType.NEW_GROUP, OpType.EMPTY})
OVER_LINKS = [
    (OpType.ALL_REDUCE, all_reduce.small_link),
    (OpType.REDUCE, reduce.small_link),
    (OpType.BROADCAST, broadcast.small_link),
    (OpType.ALL_GATHER, all_gather.small_link),
    (OpType.GATHER, gather.small_link),
    (OpType.SCATTER, scatter.small_link),
    (OpType.REDUCE_SCATTER, reduce_scatter.small_link),
]
OVER_SEGMENTS = [
    (OpType.ALL_REDUCE, all_reduce.small_segment, all_reduce.chunked_segment),
    (OpType.REDUCE, reduce.small_segment, reduce.chunked_segment),
]


@pytest.mark.parametrize(("kind", "small"), OVER_LINKS, ids=lambda value: getattr(value, "name", None))
def test_small_arrays_ride_along_with_the_arrival(kind, small):
    assert algorithm(kind, "link", SMALL, 2) is small
    assert algorithm(kind, "link", SMALL + 1, 2) in [found for most, found in algorithms(kind, "link") if most > SMALL]


@pytest.mark.parametrize(("kind", "small", "large"), OVER_SEGMENTS, ids=lambda value: getattr(value, "name", None))
def test_an_array_larger_than_a_slot_is_cut_into_chunks(kind, small, large):
    assert algorithm(kind, "segment", 8192, 2, slot_bytes=8192) is small
    assert algorithm(kind, "segment", 8193, 2, slot_bytes=8192) is large


@pytest.mark.parametrize(("kind", "small", "large"), OVER_SEGMENTS, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize(("ranks", "limit"), [(2, 1000), (3, 1000), (4, 500), (9, 500)])
def test_the_limits_switch_by_group_size(kind, small, large, ranks, limit, monkeypatch):
    first, last = TABLE[kind, "segment"]
    monkeypatch.setitem(TABLE, (kind, "segment"), (first._replace(limits={2: 1000, 4: 500}), last))
    assert algorithm(kind, "segment", limit, ranks, slot_bytes=1 << 20) is small
    assert algorithm(kind, "segment", limit + 1, ranks, slot_bytes=1 << 20) is large


def test_no_limit_goes_beyond_what_an_algorithm_can_take(monkeypatch):
    first, *rest = TABLE[OpType.GATHER, "link"]
    monkeypatch.setitem(TABLE, (OpType.GATHER, "link"), (first._replace(limits={2: SMALL * 2}), *rest))
    assert algorithm(OpType.GATHER, "link", SMALL + 1, 2) is gather.direct_link


@pytest.mark.parametrize(("kind", "medium"), TABLE, ids=lambda value: getattr(value, "name", value))
def test_every_algorithm_is_taken_by_a_call(kind, medium):
    rows = TABLE[kind, medium]
    assert rows[-1].limits == {2: ANY}, "takes every array"
    assert all(2 in row.limits for row in rows)
    edges = {1, 1 << 30, *(int(limit) for row in rows for limit in row.limits.values() if 0 < limit < ANY)}
    calls = itertools.product(edges, (0, 1), [*range(2, 18), 33, 100], ({}, {"shares_cores": True}))
    taken = {algorithm(kind, medium, nbytes + more, size, 1 << 20, **flags) for nbytes, more, size, flags in calls}
    assert taken == {row.algorithm for row in rows}


def test_every_algorithm_says_its_steps_and_its_bytes():
    for (kind, _), rows in TABLE.items():
        for row in rows:
            steps = (row.algorithm.__doc__ or "").partition("Steps:")[2]
            assert steps, row
            assert "byte" in steps or kind is OpType.BARRIER, row


MANY = (17, 64, 100, 1000, 10_000)


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_many_ranks_do_not_all_address_each_other(kind):
    for size in MANY:
        for nbytes in (4, 1 << 12, 1 << 17, 1 << 24, 1 << 30):
            found = algorithm(kind, "link", nbytes, size)
            rooted = kind in (OpType.GATHER, OpType.SCATTER) and nbytes > SMALL
            assert rooted or not found.__name__.startswith(("small", "star", "direct"))


@pytest.mark.parametrize("size", range(2, 17))
def test_few_ranks_pass_on_no_partial_results_that_are_longer_than_the_arrays(size):
    for nbytes in (2 << 20, 1 << 24, 1 << 30):
        assert algorithm(OpType.ALL_REDUCE, "link", nbytes, size) is all_reduce.direct_link


def test_the_backend_tells_shared_cores():
    count, plain = 1 << 20, np.dtype(np.float32)
    links = MemoryWorld(4).links, MemoryWorld(4, shares_cores=True).links
    own, shared = (CpuBackend(each[0]).algorithm for each in links)
    assert own(Call(OpType.BROADCAST, plain, count, None, 0)) is broadcast.scatter_link
    assert shared(Call(OpType.BROADCAST, plain, count, None, 0)) is broadcast.chunked_tree_link


def test_an_unused_row_takes_not_even_an_empty_array():
    assert NEVER < 0
    assert algorithm(OpType.REDUCE, "link", 0, 6) is reduce.star_link
    assert algorithm(OpType.REDUCE, "link", 0, 13) is reduce.tree_link


@pytest.mark.parametrize("count", [0, 1, 5, 9, 10, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_shares_cover_everything_once(count, size):
    covered = [index for share in shards(count, size) for index in range(count)[share]]
    assert covered == list(range(count))
    assert len(shards(count, size)) == size


def test_pieces_cover_everything_once():
    assert [index for piece in chunks(10, 4) for index in range(10)[piece]] == list(range(10))
    assert chunks(0, 4) == []


def test_what_has_no_row_of_its_own_takes_the_simpler_one_with_its_limits():
    sizes = (0, 1 << 10, 1 << 17, (1 << 17) + 1, 1 << 20, 1 << 30)
    for kind, medium, nbytes in itertools.product(COLLECTIVES, ("reads", "registered"), sizes):
        if rows_of(kind, medium) is TABLE[kind, "segment"]:
            found = algorithm(kind, medium, nbytes, 2, slot_bytes=1 << 20)
            assert found is algorithm(kind, "segment", nbytes, 2, slot_bytes=1 << 20)


def test_arrays_cut_into_chunks_may_be_longer_than_a_slot():
    limit = int(TABLE[OpType.BROADCAST, "reads"][0].limit(2))
    assert algorithm(OpType.BROADCAST, "reads", limit, 2, 4096) is broadcast.over_segment
