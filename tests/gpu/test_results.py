"""Every collective, operation and element type over every engine for arrays on GPUs, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = {
    ("nccl", 2): 10, ("nccl", 3): 20, ("cuda-ipc", 2): 10, ("cuda-ipc", 3): 20, ("cuda-ipc", 4): 20, ("staged", 2): 10,
}  # fmt: skip
"""Engines and numbers of ranks, and of how many cells one is gone through over the double; on GPUs it is all of them.

RANKMESH_TEST_GPU=all goes through all of them over the double, too, in two minutes.
"""


def all_cells(me: Me, backend: str | None, space: str, every: int) -> None:
    from support.sweep.cover import sweep

    me.init(timeout=60, backend=backend)
    sweep(me, space, every=every)
    dist.destroy_process_group()


@pytest.mark.parametrize(("engine", "size"), WORLDS)
def test_results_are_those_of_numpy(ranks: Ranks, machine: Any, engine: str, size: int) -> None:
    environment, backend = machine.engine(engine, size)
    space = "gpu, roughly" if engine == "nccl" else "gpu"  # NCCL rounds in an order of its own
    every = 1 if machine.thorough else WORLDS[engine, size]
    started = ranks.start(all_cells, size, env=environment, backend=backend, space=space, every=every)
    ranks.succeed(started)
    said = [rank.said[space] for rank in started]
    assert not [text for found in said for text in found["wrong"]]
    assert {found["cells"] for found in said} == {len(cells_of(space, size)[::every])}
