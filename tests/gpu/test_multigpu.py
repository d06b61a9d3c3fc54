"""Several GPUs a rank, and messages between GPUs that could wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpus import on_gpus
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def several(me: Me) -> None:
    import cupy

    me.init(timeout=60)
    rank, size, gpus, count = me.rank, me.size, 2, 1000
    seats = gpus * size

    def on(gpu: int, array: np.ndarray) -> Any:
        with cupy.cuda.Device(gpu):
            return cupy.asarray(array)

    def value(array: Any) -> np.ndarray:
        with array.device:
            return array.get()

    def given(seat: int, part: int = 0) -> np.ndarray:
        return np.arange(count, dtype="f4") % 13 + 10 * seat + part

    def mine() -> list[Any]:
        return [on(gpu, given(gpus * rank + gpu)) for gpu in range(gpus)]

    def same(arrays: list[Any], expected: list[np.ndarray]) -> bool:
        return all((value(array) == wanted).all() for array, wanted in zip(arrays, expected, strict=True))

    array = mine()[1]
    results = [dist.functional.all_reduce(array), dist.functional.all_gather_single(array)]
    assert {(type(result), result.device.id) for result in results} == {(type(array), 1)}, "not the current device"
    wanted = [given(gpus * other + 1) for other in range(size)]
    assert same(results, [sum(wanted), np.concatenate(wanted)])
    everyone = [given(seat) for seat in range(seats)]
    own = [given(gpus * rank + gpu) for gpu in range(gpus)]
    total = sum(everyone)
    arrays = mine()
    dist.all_reduce_multigpu(arrays)
    assert same(arrays, [total] * gpus)
    arrays = mine()
    dist.all_reduce_multigpu(arrays, dist.ReduceOp.PREMUL_SUM(2.0))
    assert same(arrays, [2 * total] * gpus)
    arrays = [on(gpu, given(gpus * rank + gpu).astype("i2")) for gpu in range(gpus)]
    dist.all_reduce_multigpu(arrays, dist.ReduceOp.AVG)
    assert same(arrays, [(total // seats).astype("i2")] * gpus)
    arrays = [on(gpu, given(gpus * rank + gpu).astype("i2")) for gpu in range(gpus)]
    dist.all_reduce_multigpu(arrays)
    assert same(arrays, [total.astype("i2")] * gpus)
    arrays = mine()
    dist.broadcast_multigpu(arrays, 1, src_tensor=1)
    assert same(arrays, [everyone[3]] * gpus)
    arrays = mine()
    dist.reduce_multigpu(arrays, 0, dst_tensor=1)
    assert same(arrays, [own[0], total if rank == 0 else own[1]])
    outputs = [[on(gpu, np.zeros(count, "f4")) for _ in range(seats)] for gpu in range(gpus)]
    work = dist.all_gather_multigpu(outputs, mine(), async_op=True)
    work.wait(60)
    work.get_future().wait(60)
    assert all(same(arrays, everyone) for arrays in outputs)
    inputs = [[on(gpu, given(gpus * rank + gpu, part)) for part in range(seats)] for gpu in range(gpus)]
    arrays = [on(gpu, np.zeros(count, "f4")) for gpu in range(gpus)]
    dist.reduce_scatter_multigpu(arrays, inputs)
    wanted = [sum(given(seat, gpus * rank + gpu) for seat in range(seats)) for gpu in range(gpus)]
    assert same(arrays, wanted)
    dist.destroy_process_group()


def test_each_gpu_of_a_rank_takes_part(ranks: Ranks, machine: Any) -> None:
    if machine.gpus:
        pytest.skip("two GPUs for each of two ranks: only the double is sure to have them")
    ranks.run(several, 2, env=on_gpus([[0, 1], [2, 3]]))


def crossing(me: Me) -> None:
    import cupy

    me.init(timeout=60)
    rank, size = me.rank, me.size
    given, taken = cupy.full(1000, float(rank)), cupy.zeros(1000)
    after, before = (rank + 1) % size, (rank - 1) % size
    # A ring: whoever connected first to the next one would wait for it.
    ring = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, taken, before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert (taken.get() == before).all()
    # Two that both send first.
    if rank < 2:
        taken = cupy.zeros(1000)
        works = [dist.isend(given, 1 - rank), dist.irecv(taken, 1 - rank)]
        for work in works:
            work.wait()
        assert (taken.get() == 1 - rank).all()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["nccl", "staged"])
def test_messages_that_cross_arrive(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, _ = machine.engine(engine, 3)
    started = ranks.start(crossing, 3, env=environment)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    assert ["share a GPU" in rank.complaints for rank in started] == [engine == "staged", False, False]


def leaving(me: Me) -> None:
    import cupy

    me.init(timeout=60)
    array = cupy.zeros(1000)
    dist.all_reduce(array)
    dist.barrier()
    if me.rank == 1:
        dist.destroy_process_group()
        return
    work = dist.all_reduce(array, async_op=True)
    reported = me.attempt(work.wait, 30)
    me.report(**reported)
    dist.destroy_process_group()


def test_a_rank_that_has_left_is_not_waited_for(ranks: Ranks, machine: Any) -> None:
    environment, backend = machine.engine("nccl", 2)
    assert backend == "nccl"
    reported = ranks.run(leaving, 2, env=environment)[0].reported
    assert reported["error"] == "RankFailedError"
    assert reported["text"].startswith("rank 1 ")
