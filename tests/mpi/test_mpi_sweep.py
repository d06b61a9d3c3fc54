"""The sweep of tests/sdk/test_sweep.py under backend "mpi": one mpirun for each number of ranks."""

from __future__ import annotations

import pytest
from support.mpi import MpiRun
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist

SIZES = (2, 3, 4)


def all_cells(me: Me, cells: dict[str, list[list[object]]]) -> None:
    from support.sweep.cover import sweep

    dist.init_process_group("mpi", timeout=60)
    assert dist.get_backend() == "mpi"
    sweep(me, "mpi", cells["mpi"], dist)
    downwards = list(range(me.size))[::-1]
    for name, ranks in ("all, reversed", downwards), ("every other one", downwards[::2]):
        group = dist.new_group(ranks, group_desc=name, sort_ranks=False)
        if me.rank in ranks:
            sweep(me, name, cells[name], dist, group)
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "size"), [*enumerate(SIZES)])
def test_results_are_those_of_numpy(ranks: Ranks, world: int, size: int) -> None:
    of_groups = cells_of("groups, in any order", (*SIZES, *((size + 1) // 2 for size in SIZES)))
    cells = {
        "mpi": cells_of("mpi", SIZES)[world],
        "all, reversed": of_groups[world],
        "every other one": of_groups[len(SIZES) + world],
    }
    reported = MpiRun(ranks, all_cells, size, cells=cells).succeed()
    for space in cells:
        found = [of_rank[space] for of_rank in reported if space in of_rank]
        assert len(found) == ((size + 1) // 2 if space == "every other one" else size)
        assert not [text for each in found for text in each["wrong"]]
        assert len({each["digest"] for each in found}) == 1, "all_reduce is the same bit for bit at all ranks"
