"""Every collective, operation and element type over every engine for arrays on GPUs, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from support.matrix import sweep
from support.once import once
from support.processes import Me, Rank, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = [("nccl", 2), ("nccl", 3), ("cuda-ipc", 2), ("cuda-ipc", 3), ("cuda-ipc", 4), ("staged", 2), ("staged", 3)]


def whole_matrix(me: Me, backend: str | None, part: str, every: int) -> None:
    from support.matrix import sweep

    me.init(timeout=20, backend=backend)
    t = time.monotonic()
    sweep.sweep(me, getattr(sweep, part), every=every)
    me.say(took=time.monotonic() - t)
    dist.destroy_process_group()


def part_of(engine: str) -> sweep.Part:
    """NCCL rounds in an order of its own."""
    return sweep.roughly_on_gpus if engine == "nccl" else sweep.on_gpus


@pytest.mark.parametrize(("engine", "size"), WORLDS)
def test_results_are_those_of_numpy(ranks: Ranks, machine: Any, engine: str, size: int) -> None:
    environment, backend = machine.engine(engine, size)
    part = part_of(engine)
    every = 1
    started = ranks.start(whole_matrix, size, env=environment, backend=backend, part=part.__name__, every=every)
    ranks.succeed(started)
    said = [rank.said[part.__name__] for rank in started]
    assert not [text for found in said for text in found["wrong"]]
    assert {found["cells"] for found in said} == {len(sweep.cells_of(part, size)[::every])}
    print(said, started[0].said["took"])
