"""The table that picks algorithms."""

from __future__ import annotations

import pytest

from rankmesh_agent.collectives import all_reduce
from rankmesh_agent.collectives.link import pieces, shares
from rankmesh_agent.collectives.select import algorithm, algorithms
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import Kind


def test_small_arrays_ride_along_with_the_arrival():
    assert algorithm(Kind.ALL_REDUCE, "link", SMALL) is all_reduce.small_link
    assert algorithm(Kind.ALL_REDUCE, "link", SMALL + 1) is all_reduce.direct_link


def test_an_array_larger_than_a_slot_is_cut_into_chunks():
    assert algorithm(Kind.ALL_REDUCE, "segment", 8192, slot_bytes=8192) is all_reduce.small_segment
    assert algorithm(Kind.ALL_REDUCE, "segment", 8193, slot_bytes=8192) is all_reduce.chunked_segment


def test_every_algorithm_says_its_steps_and_its_bytes():
    for _, _, found in algorithms():
        assert "Steps:" in (found.__doc__ or ""), found


@pytest.mark.parametrize("count", [0, 1, 5, 9, 10, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_shares_cover_everything_once(count, size):
    covered = [index for share in shares(count, size) for index in range(count)[share]]
    assert covered == list(range(count))
    assert len(shares(count, size)) == size


def test_pieces_cover_everything_once():
    assert [index for piece in pieces(10, 4) for index in range(10)[piece]] == list(range(10))
    assert pieces(0, 4) == []
