"""What is more than MPI can count in one call, with small numbers for that, and once with more than 2 GiB."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.mpi import on_mpi, run
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist

GIB = 1 << 30
NEEDED = 4 * GIB


def free() -> int:
    """Return how many bytes of memory these processes may take."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return there if allowed == "max" else min(there, int(allowed))


FREE = free()


LIMITS = (1, 7, 100)
"""Elements that a call takes."""


def in_pieces(me: Me, cells: list[list[list[object]]]) -> None:
    from support.sweep.cover import sweep

    from rankmesh_agent.mpi.collectives import Collectives

    dist.init_process_group("mpi", timeout=60)
    backend = dist.group.WORLD._communicator.queue.backend
    for most, own in zip(LIMITS, cells, strict=True):
        backend._collectives = Collectives(backend.comm, most)
        dist.group.WORLD._communicator.queue._plans.clear()
        sweep(me, str(most), own, dist)


def test_calls_are_cut_into_what_can_be_counted(ranks: Ranks) -> None:
    cells = cells_of("groups, in any order", (3,) * len(LIMITS))
    for reported in run(ranks, in_pieces, 3, cells=cells):
        assert [reported[str(most)]["wrong"] for most in LIMITS] == [[]] * len(LIMITS)


@pytest.mark.skipif(FREE < NEEDED, reason=f"needs {NEEDED // GIB} GiB of free memory, and {FREE // GIB} GiB are there")
@on_mpi(2)
def test_more_than_2_gib(me: Me) -> None:
    """Rank 0, which only sends, needs hardly any memory: the kernel has one page for all zeros that are only read."""
    dist.init_process_group("mpi", timeout=100)
    count = (1 << 31) + 5
    array = np.zeros(count, np.uint8)
    places = [0, count // 2, count - 1]
    if me.rank == 0:
        array[places] = [1, 2, 3]
    dist.broadcast(array, 0)
    assert array[places].tolist() == [1, 2, 3]
    if me.rank == 0:
        array[places] = [4, 5, 6]
        dist.send(array, 1)
    else:
        dist.recv(array, 0)
    assert array[places].tolist() == [4, 5, 6]
    dist.barrier()
