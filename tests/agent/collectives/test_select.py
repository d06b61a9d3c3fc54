"""The table that picks algorithms."""

from __future__ import annotations

import inspect

import pytest

from rankmesh_agent.collectives import all_gather, all_reduce, broadcast, gather, model, reduce, reduce_scatter, scatter
from rankmesh_agent.collectives.link import FEW_RANKS, chunks, shards
from rankmesh_agent.collectives.select import HIERARCHICAL, _rows, algorithm, algorithms, candidates, table_row
from rankmesh_agent.collectives.thresholds import LIMITS, MEASURED_BYTES, MEASURED_RANKS
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import OpType

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


@pytest.mark.parametrize("medium", ["segment", "link"])
@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("nbytes", [0, 1, SMALL, 1 << 20, 1 << 40])
def test_there_is_an_algorithm_for_every_collective_medium_and_size(kind, medium, nbytes):
    found = algorithm(kind, medium, nbytes, 2, slot_bytes=1 << 20 if medium == "segment" else None)
    assert found.__module__.rpartition(".")[2] == kind.name.lower()
    assert (kind, medium, found) in algorithms()
    assert next(iter(inspect.signature(found).parameters)) == medium


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("nbytes", [0, 1, SMALL, 1 << 20, 1 << 40])
def test_between_hosts_there_is_one_for_every_collective_too(kind, nbytes):
    found = algorithm(kind, "hosts", nbytes, 4)
    assert kind.name.lower() in (found.__module__.rpartition(".")[2], found.__name__)
    assert (found in HIERARCHICAL) == (".hierarchical." in found.__module__)
    assert next(iter(inspect.signature(found).parameters)) == ("topology" if found in HIERARCHICAL else "link")


@pytest.mark.parametrize(("kind", "small"), OVER_LINKS, ids=lambda value: getattr(value, "name", None))
def test_small_arrays_ride_along_with_the_arrival(kind, small):
    assert algorithm(kind, "link", SMALL, 2) is small
    assert algorithm(kind, "link", SMALL + 1, 2) in [found for most, found in candidates(kind, "link") if most > SMALL]


@pytest.mark.parametrize(("kind", "small", "large"), OVER_SEGMENTS, ids=lambda value: getattr(value, "name", None))
def test_an_array_larger_than_a_slot_is_cut_into_chunks(kind, small, large):
    assert algorithm(kind, "segment", 8192, 2, slot_bytes=8192) is small
    assert algorithm(kind, "segment", 8193, 2, slot_bytes=8192) is large


@pytest.mark.parametrize(("kind", "small", "large"), OVER_SEGMENTS, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize(("ranks", "limit"), [(2, 1000), (3, 1000), (4, 500), (9, 500)])
def test_the_measured_limits_switch_by_group_size(kind, small, large, ranks, limit, monkeypatch):
    monkeypatch.setitem(LIMITS, (kind.name, "segment"), {"small_segment": {2: 1000, 4: 500}})
    _rows.cache_clear()
    try:
        assert algorithm(kind, "segment", limit, ranks, slot_bytes=1 << 20) is small
        assert algorithm(kind, "segment", limit + 1, ranks, slot_bytes=1 << 20) is large
    finally:
        _rows.cache_clear()


def test_no_measured_limit_goes_beyond_what_an_algorithm_can_take(monkeypatch):
    monkeypatch.setitem(LIMITS, ("GATHER", "link"), {"small_link": {2: SMALL * 2}})
    _rows.cache_clear()
    try:
        assert algorithm(OpType.GATHER, "link", SMALL + 1, 2) is gather.tree_link
    finally:
        _rows.cache_clear()


def test_measured_limits_are_of_algorithms_that_are_there():
    for (name, medium), limits in LIMITS.items():
        rows = candidates(OpType[name], medium)
        assert set(limits) <= {found.__name__ for _, found in rows[:-1]}
        assert all(limits.values())


def test_every_algorithm_says_its_steps_and_its_bytes():
    for kind, _, found in algorithms():
        steps = (found.__doc__ or "").partition("Steps:")[2]
        assert steps, found
        assert "byte" in steps or kind is OpType.BARRIER, found


BEYOND = [(size, nbytes) for size in (13, 17, 100, 10_000) for nbytes in (4, 1 << 12, 1 << 17, 1 << 24, 1 << 30)]


@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_the_model_selects_for_more_ranks_than_were_measured(kind):
    for size, nbytes in BEYOND:
        able = [found for most, found in candidates(kind, "link") if nbytes <= most]
        found = algorithm(kind, "link", nbytes, size)
        times = {each: model.seconds(each, "link", nbytes, size) for each in able}
        assert times[found] == min(times.values())
        if size > FEW_RANKS and kind not in (OpType.GATHER, OpType.SCATTER):
            assert not found.__name__.startswith(("small", "star", "direct"))


def test_the_model_takes_trees_for_short_arrays_and_rings_or_halves_for_long_ones():
    for size in (17, 64, 1000):
        assert algorithm(OpType.ALL_REDUCE, "link", 4, size) is all_reduce.doubling_link
        assert algorithm(OpType.ALL_REDUCE, "link", 1 << 30, size) in (all_reduce.ring_link, all_reduce.halving_link)
        assert algorithm(OpType.BROADCAST, "link", 4, size) is broadcast.tree_link
        assert algorithm(OpType.BROADCAST, "link", 1 << 24, size) is broadcast.scatter_link
        assert algorithm(OpType.GATHER, "link", 4, size) is gather.tree_link
        assert algorithm(OpType.GATHER, "link", 1 << 24, size) is gather.direct_link
        assert algorithm(OpType.ALL_GATHER, "link", 1 << 24, size) is all_gather.ring_link
        assert algorithm(OpType.REDUCE_SCATTER, "link", 1 << 24, size) is reduce_scatter.ring_link


@pytest.mark.parametrize("size", [2, 3, 8, MEASURED_RANKS])
@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_what_is_best_for_the_most_bytes_measured_is_taken_for_more(kind, size):
    most = algorithm(kind, "link", MEASURED_BYTES, size)
    assert {algorithm(kind, "link", nbytes, size) for nbytes in (MEASURED_BYTES + 1, 1 << 30, 1 << 40)} == {most}
    assert "doubling" not in most.__name__  # it sends all bytes in each step


@pytest.mark.parametrize("count", [0, 1, 5, 9, 10, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_shares_cover_everything_once(count, size):
    covered = [index for share in shards(count, size) for index in range(count)[share]]
    assert covered == list(range(count))
    assert len(shards(count, size)) == size


def test_pieces_cover_everything_once():
    assert [index for piece in chunks(10, 4) for index in range(10)[piece]] == list(range(10))
    assert chunks(0, 4) == []


@pytest.mark.parametrize("medium", ["reads", "registered"])
@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_what_has_no_row_of_its_own_takes_the_simpler_one_with_its_limits(kind, medium):
    for nbytes in (0, 1 << 10, 1 << 17, (1 << 17) + 1, 1 << 20, 1 << 30):
        found = algorithm(kind, medium, nbytes, 2, slot_bytes=1 << 20)
        if table_row(kind, medium) == "segment":
            assert found is algorithm(kind, "segment", nbytes, 2, slot_bytes=1 << 20)


def test_who_cuts_arrays_into_chunks_may_take_more_than_a_slot():
    rows = _rows(OpType.BROADCAST, "reads", 2, 4096)
    assert rows[0] == (LIMITS["BROADCAST", "reads"]["over_segment"][2], broadcast.over_segment)
