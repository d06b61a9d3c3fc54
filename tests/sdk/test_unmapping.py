"""Shared memory is unmapped when its group is destroyed, not when the garbage collector comes."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from support.processes import Me, on_ranks

import rankmesh as dist


def mapped() -> int:
    """Return how many mappings of shared memory this process has."""
    return sum("/rankmesh-" in line or "/dev/shm/" in line for line in Path("/proc/self/maps").open())


@on_ranks(2, env={"RANKMESH_TRANSPORT": "shm"})
def test_a_destroyed_group_is_unmapped_at_once(me: Me) -> None:
    gc.disable()
    for _ in range(2):
        me.init()
        dist.all_reduce(np.ones(1000))
        before = mapped()
        for _ in range(3):
            group = dist.new_group([0, 1])
            array = dist.empty(1000, group=group)
            assert array is not None
            array[:] = 1
            dist.all_reduce(array, group=group)
            work = dist.all_reduce(np.ones(10), group=group, async_op=True)
            assert work is not None
            work.wait()
            dist.send(np.ones(10), 1, group=group) if me.rank == 0 else dist.recv(np.ones(10), 0, group=group)
            dist.barrier(group)
            part = array[10:20]
            del array, work
            assert mapped() >= before + 2
            dist.destroy_process_group(group)
            assert mapped() == before + 1, "a part of the array is still there"
            assert (part == 2).all()
            part[:] = 3  # it stays valid
            assert (part == 3).all()
            del part
            assert mapped() == before
        dist.barrier()
        dist.destroy_process_group()
        assert mapped() == 0
