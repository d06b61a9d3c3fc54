"""Backend "mpi" on arrays on GPUs, of the double of CuPy: they go through host memory, which MPI moves."""

from __future__ import annotations

import pytest
from support.gpus import on_gpus
from support.mpi import on_mpi
from support.processes import Me

import rankmesh as dist

GPUS = on_gpus([0])(0)


@pytest.mark.parametrize("backend", ["mpi", "cpu:mpi,cuda:mpi"])
@on_mpi(2, env=GPUS)
def test_arrays_on_gpus_go_through_host_memory(me: Me, backend: str) -> None:
    import cupy

    dist.init_process_group(backend, timeout=60)
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    array = cupy.full(1000, me.rank + 1.0)
    dist.all_reduce(array)
    assert (array.get() == 3).all()
    dist.destroy_process_group()
