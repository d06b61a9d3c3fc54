"""Worlds that grow while arrays on GPUs are reduced: the new world has an engine of its own."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def grow(me: Me, backend: str | None) -> None:
    import cupy

    if me.rank == 2:
        me.join(backend=backend)
    else:
        me.init(world_size=2, backend=backend)
        array = cupy.full(1000, me.rank + 1.0)
        dist.all_reduce(array)
        assert float(array[999].get()) == 3
        dist.grow_group(3)
        assert float(array[0].get()) == 3
    array = cupy.full(1000, me.rank + 1.0)
    dist.all_reduce(array)
    assert float(array[999].get()) == 6
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["nccl", "staged"])
def test_the_larger_world_reduces_on_gpus(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 3)
    ranks.run(grow, 3, env=environment, backend=backend)
