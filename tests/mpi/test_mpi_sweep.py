"""The sweep of tests/sdk/test_sweep.py under backend "mpi": one mpirun for each number of ranks."""

from __future__ import annotations

import pytest
from support.mpi import MpiRun
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist


def all_cells(me: Me) -> None:
    from support.sweep.cover import sweep

    dist.init_process_group("mpi", timeout=60)
    assert dist.get_backend() == "mpi"
    sweep(me, "mpi")
    downwards = list(range(me.size))[::-1]
    for ranks, name in (downwards, "all, reversed"), (downwards[::2], "every other one"):
        sweep(me, "groups, in any order", dist.new_group(ranks, group_desc=name, sort_ranks=False), every=3)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_those_of_numpy(ranks: Ranks, size: int) -> None:
    said = MpiRun(ranks, all_cells, size).succeed()
    for space in ("mpi", "groups, in any order in all, reversed", "groups, in any order in every other one"):
        found = [of_rank[space] for of_rank in said if space in of_rank]
        assert len(found) == ((size + 1) // 2 if "every other" in space else size)
        assert not [text for each in found for text in each["wrong"]]
        assert len({each["digest"] for each in found}) == 1, "all_reduce is the same bit for bit at all ranks"
    assert said[0]["mpi"]["cells"] == len(cells_of("mpi", size))
