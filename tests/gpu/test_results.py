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


def factors(me: Me, backend: str | None) -> None:
    """PREMUL_SUM by a factor of each rank's own, of what NCCL multiplies and of other arrays; inputs are kept."""
    import cupy

    me.init(timeout=60, backend=backend)
    op = dist.ReduceOp.PREMUL_SUM(me.rank + 2)
    for dtype in ("float32", "int32"):
        array = cupy.full(100, me.rank + 1, dtype)
        dist.all_reduce(array, op)
        assert set(array.get().tolist()) == {1 * 2 + 2 * 3}
        inputs, output = cupy.arange(20).astype(dtype), cupy.zeros(10, dtype)
        dist.reduce_scatter_tensor(output, inputs, op)
        assert output.get().tolist() == [5 * (10 * me.rank + number) for number in range(10)]
        assert inputs.get().tolist() == list(range(20))
        array = cupy.full(10, me.rank + 1, dtype)
        dist.reduce(array, 1, op)
        assert set(array.get().tolist()) == {8 if me.rank == 1 else 1}
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["nccl", "staged"])
def test_each_rank_has_a_factor_of_its_own(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    started = ranks.start(factors, 2, env=environment, backend=backend)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
