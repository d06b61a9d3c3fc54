"""Every collective, operation and element type over every engine for arrays on GPUs, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = {"nccl": (2, 3), "nccl, one gpu": (2, 4), "staged": (2, 4)}
"""Engines and numbers of ranks, which share the cells. Over the double, one of EVERY is gone through, on GPUs all.

RANKMESH_TEST_GPU=all goes through all of them over the double, too.
"""
EVERY = 10


def all_cells(me: Me, backend: str | None, cells: list[list[object]]) -> None:
    from support.sweep.cover import sweep

    me.init(timeout=60, backend=backend)
    sweep(me, "found", cells, dist)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("engine", "world"), [(engine, world) for engine, sizes in WORLDS.items() for world in range(len(sizes))]
)
def test_results_are_those_of_numpy(ranks: Ranks, machine: Any, engine: str, world: int) -> None:
    size = WORLDS[engine][world]
    environment, backend = machine.engine(engine, size)
    space = "gpu" if engine == "staged" else "gpu, roughly"  # NCCL rounds in an order of its own
    cells = cells_of(space, WORLDS[engine])[world][:: 1 if machine.thorough else EVERY]
    started = ranks.start(all_cells, size, env=environment, backend=backend, cells=cells)
    ranks.wait(started)
    for rank in started:
        assert rank.code == 0
        warned = rank.complaints.splitlines()  # of the first reduction that NCCL lacks
        assert len(warned) == (engine != "staged" and rank is started[0]), warned
        assert all("goes through host memory in group 'world': NCCL does not have it" in line for line in warned)
    assert not [text for rank in started for text in rank.reported["found"]["wrong"]]
