"""The overlay is symmetric and connected, and grows with the logarithm of the ranks."""

from __future__ import annotations

import math

import pytest

from rankmesh_agent.wire.overlay import neighbours


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 33, 64, 100, 256, 1000])
def test_neighbours_are_mutual_and_few_and_reach_every_rank(size: int) -> None:
    near = [neighbours(rank, size, 0) for rank in range(size)]
    assert all(rank in near[other] for rank in range(size) for other in near[rank])
    assert all(rank not in near[rank] for rank in range(size))
    assert max(map(len, near)) <= 2 * math.ceil(math.log(max(size, 2), 4))
    reached, hops = {0}, 0
    while len(reached) < size:
        reached |= {other for rank in reached for other in near[rank]}
        hops += 1
    assert hops <= 2 * math.ceil(math.log2(max(size, 2)))


def test_up_to_the_full_mesh_all_ranks_are_neighbours() -> None:
    assert neighbours(2, 5, 5) == [0, 1, 3, 4]
    assert neighbours(2, 9, 5) == [1, 3, 6, 7]
