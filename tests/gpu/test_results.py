"""Every collective, operation and element type over every engine for arrays on GPUs, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from support.matrix import sweep
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = {
    ("nccl", 2): 23, ("nccl", 3): 41, ("cuda-ipc", 2): 23, ("cuda-ipc", 3): 41, ("cuda-ipc", 4): 41, ("staged", 2): 23,
}  # fmt: skip
"""Engines and numbers of ranks, and of how many cells one is gone through over the double; on GPUs it is all of them.

RANKMESH_TEST_GPU=all goes through all of them over the double, too, in two minutes.
"""


def whole_matrix(me: Me, backend: str | None, part: str, every: int) -> None:
    from support.matrix import sweep

    me.init(timeout=60, backend=backend)
    sweep.sweep(me, getattr(sweep, part), every=every)
    dist.destroy_process_group()


def part_of(engine: str) -> sweep.Part:
    """NCCL rounds in an order of its own."""
    return sweep.roughly_on_gpus if engine == "nccl" else sweep.on_gpus


@pytest.mark.parametrize(("engine", "size"), WORLDS)
def test_results_are_those_of_numpy(ranks: Ranks, machine: Any, engine: str, size: int) -> None:
    environment, backend = machine.engine(engine, size)
    part = part_of(engine)
    every = 1 if machine.thorough else WORLDS[engine, size]
    started = ranks.start(whole_matrix, size, env=environment, backend=backend, part=part.__name__, every=every)
    ranks.succeed(started)
    said = [rank.said[part.__name__] for rank in started]
    assert not [text for found in said for text in found["wrong"]]
    assert {found["cells"] for found in said} == {len(sweep.cells_of(part, size)[::every])}
