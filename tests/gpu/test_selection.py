"""Which engine carries out calls on arrays on GPUs, and what is reported of calls that none can."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def chosen(me: Me, backend: str | None, refused: bool) -> None:
    if refused:
        me.report(nccl=me.attempt(me.init, backend="nccl", timeout=20))
    me.init(timeout=60, backend=backend)
    host = np.full(3, me.rank + 1.0)
    dist.all_reduce(host)
    dist.barrier()
    me.report(loaded=[name for name in sys.modules if name.partition(".")[0] == "cupy"], host=float(host[0]))
    import cupy

    array = cupy.full(1000, me.rank + 1.0)
    dist.all_reduce(array)
    choice = dist.group.WORLD._communicator.gpus
    me.report(
        sum=float(array[-1].get()),
        engine="host" if choice is None else choice.backend_name,
        backend=dist.get_backend(),
        config=dist.get_backend_config(),
    )
    sent = cupy.full(3, me.rank + 1.0)
    neighbour = (me.rank - 1) % me.size
    received = cupy.zeros(3)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (me.rank + 1) % me.size), dist.P2POp(dist.irecv, received, neighbour)]
    ):
        work.wait()
    objects = [None] * me.size
    dist.all_gather_object(objects, {"rank": me.rank})
    me.report(received=float(received[0].get()), objects=objects)
    me.report(mixed=me.attempt(dist.all_gather, [np.zeros(3) for _ in range(me.size)], sent))
    if me.rank == 0:
        me.report(anyone=me.attempt(dist.recv, received, timeout=0.1))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("gpus", "without", "backend", "engine"),
    [
        ([0, 1], (), None, "nccl"),
        ([0, 1], (), "nccl", "nccl"),
        ([0, 1], (), "cpu:gloo,cuda:nccl", "nccl"),
        ([0, 0], (), None, "host"),
        ([0, 0, 1], (), None, "host"),
        ([0, 1], ("nccl",), None, "host"),
        ([0, 0], (), "gloo", "host"),
    ],
)
def test_the_engine_fits_the_gpus(
    ranks: Ranks, machine: Any, gpus: list[int], without: tuple[str, ...], backend: str | None, engine: str
) -> None:
    if backend == "nccl" and not machine.thorough:
        pytest.skip("only with RANKMESH_TEST_GPU=all (make test-gpu): test_results.py asks for NCCL, too")
    environment = machine.double(gpus, without=without)
    refused = "nccl" in without
    started = ranks.start(chosen, len(gpus), env=environment, backend=backend, refused=refused)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    warned = [line for rank in started for line in rank.complaints.splitlines()]
    if engine == "host" and backend is None:
        assert len(warned) == 1, warned
        assert "arrays on GPUs go through host memory in group 'world'" in warned[0]
    else:
        assert warned == []
    size = len(gpus)
    for number, rank in enumerate(started):
        reported = rank.reported
        assert reported["engine"] == engine, reported
        assert refused or backend == "nccl" or reported["loaded"] == [], "before there was an array on a GPU"
        if refused:
            assert reported["nccl"]["error"] == "DistBackendError", reported
            assert "finds no NCCL" in reported["nccl"]["text"]
        assert reported["sum"] == reported["host"] == size * (size + 1) / 2
        assert reported["received"] == (number - 1) % size + 1
        assert reported["objects"] == [{"rank": other} for other in range(size)]
        assert reported["backend"] == ("nccl" if backend == "nccl" else "mesh")
        assert reported["config"].startswith("cpu:mesh")
        if engine != "host":
            assert reported["mixed"]["error"] == "TypeError", reported["mixed"]
            assert "all arrays of a call have to be on one GPU, or all in host memory" in reported["mixed"]["text"]
    if backend != "gloo":
        assert started[0].reported["anyone"]["error"] == "ValueError"
        assert "needs src" in started[0].reported["anyone"]["text"]


def sharing(me: Me) -> None:
    import cupy

    me.init(timeout=60)
    array = cupy.full(1000, me.rank + 1.0)
    dist.all_reduce(array)
    me.report(sum=float(array[-1].get()), config=dist.get_backend_config())
    dist.destroy_process_group()


@pytest.mark.parametrize("allowing", [3, 2])
def test_ranks_may_share_a_gpu_where_all_allow_it(ranks: Ranks, machine: Any, allowing: int) -> None:
    allowed, refused = machine.together(3), machine.shared(3)
    started = ranks.start(sharing, 3, env=lambda rank: (allowed if rank < allowing else refused)(rank))
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    config = "cpu:mesh,cuda:nccl" if allowing == 3 else "cpu:mesh,cuda:mesh"
    assert [rank.reported for rank in started] == [{"sum": 6.0, "config": config}] * 3
    assert ["NCCL_MULTI_RANK_GPU_ENABLE=1" in rank.complaints for rank in started] == [allowing < 3, False, False]


def everything_else(me: Me) -> None:
    me.report(told=me.attempt(me.init, backend="nccl", timeout=20))
    me.init(timeout=60)
    array = np.ones(10)
    dist.all_reduce(array)
    dist.all_gather_object([None] * me.size, "object")
    dist.all_reduce_multigpu([array])
    dist.barrier()
    me.report(nccl=dist.is_nccl_available(), loaded="cupy" in sys.modules)
    dist.destroy_process_group()


def test_without_cupy_all_but_arrays_on_gpus_works(ranks: Ranks, machine: Any) -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    for rank in ranks.run(everything_else, 2):
        assert not rank.reported["nccl"]
        assert not rank.reported["loaded"]
        assert rank.reported["told"]["error"] == "DistBackendError", rank.reported
        assert "pip install 'rankmesh[gpu]'" in rank.reported["told"]["text"]
