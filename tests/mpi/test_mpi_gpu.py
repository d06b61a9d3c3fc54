"""Backend "mpi" on arrays on GPUs: MPI is given their addresses where it takes them, else it is an error.

The GPUs are those of the double of CuPy, whose memory is the host's: any MPI takes it, so the ranks are made to believe
that this one is built for GPUs.
"""

from __future__ import annotations

import threading

from support.gpus import on_gpus, with_kernels
from support.mpi import on_mpi, run
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

import rankmesh as dist

GPUS = on_gpus([0])(0)


def all_cells(me: Me, cells: list[list[object]]) -> None:
    from support.sweep.cover import sweep

    from rankmesh_agent.mpi import library

    library.cuda_aware = lambda: True  # see above
    dist.init_process_group("mpi", timeout=60)
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    sweep(me, "found", cells, dist)
    dist.destroy_process_group()


@with_kernels
def test_an_mpi_that_takes_them_moves_and_reduces_them(ranks: Ranks) -> None:
    cells = cells_of("gpu, in any order", (3,))[0][::4]
    for reported in run(ranks, all_cells, 3, env=GPUS, cells=cells):
        assert reported["found"]["wrong"] == []


@with_kernels
@on_mpi(2, env=GPUS)
def test_a_stream_that_holds_a_call_up_is_waited_for_until_its_timeout(me: Me) -> None:
    """The stream does not get to the call: nobody is in MPI, and the call's timeout ends it."""
    import cupy

    from rankmesh_agent.mpi import library

    library.cuda_aware = lambda: True  # see above
    dist.init_process_group("mpi", timeout=60)
    array, gate = cupy.ones(100), threading.Event()
    dist.all_reduce(array)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.launch_host_func(lambda _: gate.wait(30), None)
    with stream:
        told = me.attempt(dist.all_reduce, array, timeout=1)
    gate.set()
    assert told["error"] in ("CollectiveTimeoutError", "GroupAbortedError"), told  # one rank's is over first
    assert "the work before it on the stream did not end within 1.0 s" in told["text"]


@on_mpi(2, env=GPUS)
def test_an_mpi_that_does_not_says_what_to_do(me: Me) -> None:
    import cupy

    dist.init_process_group("mpi", timeout=60)
    told = me.attempt(dist.all_reduce, cupy.zeros(3))
    assert told["error"] == "DistBackendError", told
    assert "this MPI does not take arrays on GPUs" in told["text"]
    assert "'cpu:mpi,cuda:nccl'" in told["text"]
