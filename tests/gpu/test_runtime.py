"""What CUDA says and does beside streams: errors of what was enqueued, contexts of threads, identities of GPUs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def failing(me: Me) -> None:
    import cupy

    from rankmesh_agent.device import runtime as cuda

    runtime = cupy.cuda.runtime
    pointer, stream, event = runtime.malloc(64), cupy.cuda.Stream(non_blocking=True), cuda.create_event()
    gate = threading.Event()
    stream.launch_host_func(lambda _: gate.wait(), None)
    runtime.memsetAsync(pointer, 0, 64, stream.ptr)
    cuda.record_event(event, stream.ptr)
    me.report(before=cuda.event_completed(event))
    cupy._memory.release(pointer)
    gate.set()

    def look() -> None:
        until = time.monotonic() + 30
        while not cuda.event_completed(event) and time.monotonic() < until:
            time.sleep(0.001)

    me.report(after=me.attempt(look))


def test_an_error_of_the_gpu_is_not_taken_for_one_that_is_not_done(ranks: Ranks, machine: Any) -> None:
    (rank,) = ranks.start(failing, 1, env=machine.double([0]))
    ranks.wait([rank])
    assert rank.reported["before"] is False
    assert rank.reported["after"]["error"] == "DistBackendError", rank.reported
    assert "cudaErrorIllegalAddress" in rank.reported["after"]["text"]


def in_threads(me: Me) -> None:
    """Use the second GPU: in a thread of ours, then in a user's."""
    import cupy

    from rankmesh_agent.device import runtime as cuda

    runtime, gpus = cupy.cuda.runtime, cupy._gpus.GPUS
    runtime.setDevice(1)
    told = {}

    def run(name: str) -> None:
        with cuda.DeviceGuard(1):
            stream = cuda.create_stream()
        told[name] = {"left_on": runtime.getDevice(), "context": gpus[0].context}
        with cuda.DeviceGuard(1):
            with cuda.DeviceGuard(0):
                pass
            told[name]["inside"] = runtime.getDevice()
        cuda.destroy_stream(stream)

    for name in ("rankmesh-world", "user"):
        thread = threading.Thread(target=run, args=(name,), name=name)
        thread.start()
        thread.join()
    me.report(**told)


def test_a_thread_of_ours_stays_on_the_gpu_that_it_is_used_for(ranks: Ranks, machine: Any) -> None:
    (rank,) = ranks.run(in_threads, 1, env=machine.double([[0, 1]]))
    assert rank.reported["rankmesh-world"] == {"left_on": 1, "context": False, "inside": 1}
    assert rank.reported["user"] == {"left_on": 0, "context": True, "inside": 1}


def instances(me: Me) -> None:
    import cupy

    from rankmesh_agent.device import runtime as cuda

    me.init(timeout=60)
    array = cupy.full(10, me.rank + 1.0)
    dist.all_reduce(array)
    uuid = cupy.cuda.runtime.getDeviceProperties(0)["uuid"].hex()
    me.report(sum=float(array[0].get()), backend=dist.get_backend_config(), identity=cuda.gpu_id(0), uuid=uuid)
    dist.destroy_process_group()


def test_instances_of_one_gpu_are_one_gpu_to_nccl(ranks: Ranks, machine: Any) -> None:
    fixed = machine.double([0, 0])
    zero, one = ranks.start(instances, 2, env=lambda rank: {**fixed(rank), "CUDA_DOUBLE_GPUS": f"gpu-0/{rank}"})
    ranks.wait([zero, one])
    assert "ranks 0, 1 share a GPU, which NCCL refuses" in zero.complaints
    assert zero.reported["uuid"] != one.reported["uuid"]
    assert zero.reported["identity"] == one.reported["identity"]
    assert [rank.reported["sum"] for rank in (zero, one)] == [3.0, 3.0]
    assert "nccl" not in zero.reported["backend"]


def context(me: Me, backend: str | None) -> None:
    """All arrays are on the second GPU: nothing of ours goes to the first, in whatever thread."""
    import cupy

    cupy.cuda.Device(1).use()
    me.init(timeout=60, backend=backend)
    array = cupy.ones(1000)
    for _ in range(3):
        dist.all_reduce(array, async_op=True).wait()
        dist.all_reduce(array)
    work = dist.all_reduce(array, async_op=True)
    work.get_future().wait(60)
    dist.barrier()
    me.report(context=cupy._gpus.GPUS[0].context, value=float(array[0].get()))
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["nccl", "staged"])
def test_calls_make_no_context_on_a_gpu_that_has_no_arrays(ranks: Ranks, machine: Any, engine: str) -> None:
    gpus = [[0, 1], [2, 3]] if engine == "nccl" else [[0, 1], [0, 1]]
    for rank in ranks.run(context, 2, env=machine.double(gpus), backend="nccl" if engine == "nccl" else "gloo"):
        assert rank.reported == {"context": False, "value": 2.0**7}
