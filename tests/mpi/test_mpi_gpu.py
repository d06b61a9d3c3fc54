"""Backend "mpi" on arrays on GPUs: MPI is given their addresses where it takes them, else it is an error.

The GPUs are those of the double of CuPy, whose memory is the host's: any MPI takes it, so the ranks are made to believe
that this one is built for GPUs.
"""

from __future__ import annotations

import threading

import numpy as np
from support.gpus import on_gpus, with_kernels
from support.mpi import MpiRun, on_mpi
from support.processes import Me, Ranks

import rankmesh as dist

SIZE = 3
GPUS = on_gpus([0])(0)


def use_gpu(me: Me, aware: bool) -> None:
    import cupy
    import ml_dtypes

    from rankmesh_agent.mpi import library

    library.cuda_aware = lambda: aware  # it is not: see above
    dist.init_process_group("mpi", timeout=60)
    rank, size, ops = me.rank, me.size, dist.ReduceOp
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    if not aware:
        me.say(**me.attempt(dist.all_reduce, cupy.zeros(3)))
        dist.destroy_process_group()
        return

    def given(dtype: object, of: int) -> np.ndarray:
        return (np.arange(1000) % 7 + of).astype(dtype)

    wrong = []
    cells = [(dtype, op) for dtype in ("f4", "f8", "f2", ml_dtypes.bfloat16, "i2", "i8", "u1", "?") for op in ops]
    for dtype, op in cells:
        if op is ops.PREMUL_SUM or (np.dtype(dtype).kind not in "iub" and op.name[0] == "B"):
            continue
        if np.dtype(dtype) == bool and op is ops.AVG:
            continue
        parts = [given(dtype, of) for of in range(size)]
        host = parts[rank].copy()
        dist.all_reduce(host, op)
        for call in ("all_reduce", "reduce", "reduce_scatter"):
            if call == "all_reduce":
                array, expected = cupy.asarray(parts[rank]), host
                dist.all_reduce(array, op)
            elif call == "reduce":
                array, expected = cupy.asarray(parts[rank]), host if rank == 1 else parts[rank]
                dist.reduce(array, 1, op)
            else:
                array, expected = cupy.zeros(300, dtype), host[300 * rank : 300 * (rank + 1)]
                dist.reduce_scatter_single(array, cupy.asarray(parts[rank][:900]), op)
            if array.get().tobytes() != expected.tobytes():
                wrong.append(f"{call} {np.dtype(dtype)} {op.name}")
    mine = cupy.asarray(given("f4", rank))
    everyone = [given("f4", of) for of in range(size)]
    outputs = [cupy.zeros(1000, "f4") for _ in range(size)]
    work = dist.all_gather(outputs, mine, async_op=True)
    work.wait()
    wrong += ["all_gather"] * any((out.get() != part).any() for out, part in zip(outputs, everyone, strict=True))
    array = cupy.asarray(given("f4", rank))
    dist.broadcast(array, 2)
    wrong += ["broadcast"] * bool((array.get() != everyone[2]).any())
    gathered = [cupy.zeros(1000, "f4") for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    dist.scatter(array, gathered, 0)
    wrong += ["gather, scatter"] * bool((array.get() != everyone[rank]).any())
    inputs = [cupy.full(rank + to, 10 * rank + to, "i4") for to in range(size)]
    outputs = [cupy.zeros(rank + of, "i4") for of in range(size)]
    dist.all_to_all(outputs, inputs)
    wrong += ["all_to_all"] * any((out.get() != 10 * of + rank).any() for of, out in enumerate(outputs))
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(array, 0)
        wrong += ["recv"] * bool((array.get() != everyone[0]).any())
    dist.barrier()
    me.say(wrong=wrong)
    dist.destroy_process_group()


@with_kernels
def test_an_mpi_that_takes_them_moves_and_reduces_them(ranks: Ranks) -> None:
    said = MpiRun(ranks, use_gpu, SIZE, env=GPUS, aware=True).succeed()
    assert said == [{"wrong": []}] * SIZE


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


def test_an_mpi_that_does_not_says_what_to_do(ranks: Ranks) -> None:
    for said in MpiRun(ranks, use_gpu, 2, env=GPUS, aware=False).succeed():
        assert said["error"] == "DistBackendError"
        assert "this MPI does not take arrays on GPUs" in said["text"]
        assert "'cpu:mpi,cuda:nccl'" in said["text"]
