"""The tests' double of CuPy: it is as asynchronous as a GPU, and orders what CUDA orders."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.gpus import DOUBLE, on_gpus, with_kernels
from support.processes import Me, Ranks

pytestmark = pytest.mark.processes


def streams(me: Me) -> None:
    import cupy

    one, two, blocking = (cupy.cuda.Stream(non_blocking=flag) for flag in (True, True, False))
    array, copy, other = cupy.zeros(4), cupy.zeros(4), cupy.zeros(4)
    event, never = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event()
    cupy.cuda.Stream.null.synchronize()

    gate = threading.Event()
    one.launch_host_func(lambda _: gate.wait(), None)
    with one:
        array.fill(1)
    event.record(one)
    two.wait_event(event)
    event.record(cupy.cuda.Stream.null)  # what waits already waits for the record before
    with two:
        copy[...] = array
    me.say(late=[one.done, two.done], default_goes_on=other.get().tolist())
    never_waited = cupy.cuda.Stream(non_blocking=True)
    never_waited.wait_event(never)
    never_waited.synchronize()
    gate.set()
    two.synchronize()
    me.say(ordered=copy.get().tolist(), done=[one.done, two.done, event.done, never.done])

    gate.clear()
    blocking.launch_host_func(lambda _: gate.wait(), None)
    other.fill(3)
    null = cupy.cuda.Stream.null
    me.say(default_waits=not null.done)
    one.synchronize()
    gate.set()
    null.synchronize()
    gate.clear()
    null.launch_host_func(lambda _: gate.wait(), None)
    with blocking:
        other.fill(4)
    me.say(waits_for_default=not blocking.done)
    gate.set()
    me.say(last=other.get().tolist())


def test_streams_are_late_and_events_order_them(ranks: Ranks) -> None:
    (rank,) = ranks.run(streams, 1, env=on_gpus([0]))
    assert rank.said == {
        "late": [False, False],
        "default_goes_on": [0] * 4,
        "ordered": [1] * 4,
        "done": [True] * 4,
        "default_waits": True,
        "waits_for_default": True,
        "last": [4] * 4,
    }


def mistakes(me: Me, ordered: bool) -> None:
    """Copies that nothing orders, then memory that goes back while another stream uses it."""
    import cupy

    one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    array, copy = cupy.zeros(1), cupy.zeros(1)
    cupy.cuda.Stream.null.synchronize()
    wrong = 0
    for number in range(1, 60):
        with one:
            array.fill(number)
        if ordered:
            two.wait_event(one.record())
        with two:
            copy[...] = array
            wrong += copy.item() != number
        one.synchronize()
    freed = 0
    for _ in range(60):
        with one:
            array = cupy.ones(1)
            one.synchronize()
        with two:
            copy[...] = array
        if ordered:
            one.wait_event(two.record())
        del array
        two.synchronize()
        freed += copy.item() != 1
    me.say(wrong=wrong, freed=freed)


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_not_ordered_is_wrong_at_times(ranks: Ranks, ordered: bool) -> None:
    (rank,) = ranks.run(mistakes, 1, env=on_gpus([0], delay=0.005), ordered=ordered)
    assert {name: count > 0 for name, count in rank.said.items()} == {"wrong": not ordered, "freed": not ordered}


def memory(me: Me) -> None:
    import cupy
    import ml_dtypes

    from rankmesh_agent.device import runtime as cuda

    class Foreign:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    pool, runtime = cupy.get_default_memory_pool(), cupy.cuda.runtime
    sizes = set()
    for _ in range(1000):
        array = cupy.empty(1000) + 1
        sizes.add((pool.used_bytes(), pool.total_bytes(), runtime.memGetInfo()[0]))
    me.say(sizes=len(sizes), used=pool.used_bytes())
    within = cuda.allocation_of(array.data.ptr)
    me.say(within=[within == cuda.allocation_of(array.data.ptr + 8), within.base <= array.data.ptr])
    own = cuda.malloc(64)
    me.say(own=cuda.allocation_of(own).base == own, other=cuda.allocation_of(own).id != within.id)
    me.say(none=me.attempt(cuda.allocation_of, 0x1000)["error"])
    me.say(full=me.attempt(cupy.empty, 1 << 22)["error"], alone=me.attempt(cuda.malloc, 1 << 24)["text"])
    me.say(shared_by=cuda.gpu_id(0))

    # What CuPy refuses, too
    narrow = cupy.zeros((2, 2), ml_dtypes.float8_e4m3fn)
    refused = [(np.asarray, array), (array.fill, np.ones(1000)), (array.__add__, np.ones(1000)), (narrow.fill, 1)]
    refused += [(cupy.ascontiguousarray, narrow.T), (hash, array)]
    me.say(refused=[me.attempt(*call)["error"] for call in refused], moved=(narrow.copy().get() == 0).all().item())
    me.say(same=cupy.from_dlpack(array[8:]).data.ptr - array.data.ptr, adopted=cupy.asarray(Foreign(array)).size)

    pinned = cupy.cuda.alloc_pinned_memory(80)
    host = np.frombuffer(pinned, np.float64, 10)
    gate = threading.Event()
    stream = cuda.create_stream()
    cupy.cuda.ExternalStream(stream).launch_host_func(lambda _: gate.wait(), None)
    cuda.copy_async(host.ctypes.data, array.data.ptr, 80, stream)
    host[:] = 0
    me.say(before=host.tolist(), is_there=cuda.event_completed(cuda.create_event()))
    gate.set()
    cuda.synchronize_stream(stream)
    me.say(after=(host - array[:10].get()).tolist())

    text = 'extern "C" __global__ void run(const T* x, T* y, long long n) {'
    text += "long long i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = 2 * x[i]; }"
    kernel = cupy.RawModule(code=text.replace("T*", "double*"), options=("-std=c++14",)).get_function("run")
    array, result = cupy.arange(10, dtype=np.float64), cupy.zeros(10)
    kernel((3,), (4,), (array, result.data.ptr, 10), stream=cupy.cuda.Stream.null)
    me.say(kernel=(result == array * 2).all().item(), strided=result[1::3].flags.c_contiguous)


@with_kernels
def test_memory_is_lent_again_and_belongs_to_allocations(ranks: Ranks) -> None:
    (rank,) = ranks.run(memory, 1, env=on_gpus([7], memory=1 << 23, delay=0))
    said = rank.said
    assert re.fullmatch(r".+/0000:\w\w:\w\w\.0", said.pop("shared_by"))
    assert said.pop("sizes") <= 2
    assert said == {
        "used": 8192,
        "within": [True, True],
        "own": True,
        "other": True,
        "none": "DistBackendError",
        "full": "OutOfMemoryError",
        "alone": "cudaErrorMemoryAllocation: out of memory",
        "refused": ["TypeError", "ValueError", "TypeError", "ValueError", "ValueError", "TypeError"],
        "moved": True,
        "same": 64,
        "adopted": 1000,
        "before": [0] * 10,
        "is_there": True,
        "after": [0] * 10,
        "kernel": True,
        "strided": False,
    }


def lost(me: Me) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    pointer = runtime.malloc(64)
    stream = cupy.cuda.Stream()
    runtime.free(pointer)
    runtime.memsetAsync(pointer, 0, 64, stream.ptr)
    me.say(fails=me.attempt(stream.synchronize)["text"], still=me.attempt(cupy.empty, 1)["text"])


def test_memory_that_is_not_there_any_more_is_noticed(ranks: Ranks) -> None:
    (rank,) = ranks.start(lost, 1, env=on_gpus([0]))
    ranks.wait([rank])
    assert "memsetAsync" in rank.stderr.splitlines()[0]
    assert rank.said["fails"].startswith("cudaErrorIllegalAddress")
    assert rank.said["still"].startswith("cudaErrorIllegalAddress")


def shared(me: Me) -> None:
    """Rank 0 lends rank 1 memory, and each waits for the other on its stream only."""
    from rankmesh_agent.device import runtime as cuda

    stream, own = cuda.create_stream(), cuda.create_event(shared=True)
    if me.rank == 0:
        base = cuda.malloc(8)
        (me.folder / "memory").write_bytes(cuda.memory_handle(base))
        me.say(own=me.attempt(cuda.open_memory, cuda.memory_handle(base))["error"])
    (me.folder / f"event-{me.rank}").write_bytes(cuda.event_handle(own))
    me.meet("handles")
    other = cuda.open_event((me.folder / f"event-{1 - me.rank}").read_bytes())
    if me.rank == 1:
        base = cuda.open_memory((me.folder / "memory").read_bytes())
    host = np.zeros(1)
    if me.rank == 0:
        cuda.copy_async(base, host.ctypes.data, 8, stream)
    for turn in range(20):
        if turn % 2 == me.rank:
            cuda.copy_async(host.ctypes.data, base, 8, stream)
            host += 1
            cuda.copy_async(base, host.ctypes.data, 8, stream)
            cuda.record_event(own, stream)
            me.mark(f"turn-{turn}")
        else:
            me.wait_for(f"turn-{turn}")
            cuda.stream_wait_event(other, stream)
    cuda.copy_async(host.ctypes.data, base, 8, stream)
    me.say(counted=host[0], gpu=cuda.gpu_id(0))
    me.meet("end")
    if me.rank == 1:
        cuda.close_memory(base)


def test_processes_share_memory_and_events(ranks: Ranks) -> None:
    zero, one = ranks.run(shared, 2, env=on_gpus([3, 3]))
    assert zero.said == {"own": "CUDARuntimeError", "counted": 20, "gpu": one.said["gpu"]}
    assert one.said["counted"] == 20


def collectives(me: Me) -> None:
    import cupy
    import ml_dtypes
    from cupy.cuda import nccl

    if me.rank == 0:
        (me.folder / "made").write_bytes(nccl.get_unique_id())
        me.mark("id")
    me.wait_for("id")
    communicator = nccl.NcclCommunicator(me.size, (me.folder / "made").read_bytes(), me.rank)
    me.say(is_=[communicator.rank_id(), communicator.size(), communicator.device_id()])
    stream = cupy.cuda.Stream(non_blocking=True)

    def called(name, count, to, dtype, *arguments):
        with stream:
            source, result = cupy.asarray((np.arange(count) + me.rank).astype(dtype)), cupy.zeros(to, dtype)
            number = {"int32": 2, "float32": 7, "bfloat16": 9, "float8_e4m3fn": 10}[np.dtype(dtype).name]
            sends, counted = name != "recv", to if name == "reduceScatter" else count
            pointers = [source.data.ptr] * sends + [result.data.ptr] * (name != "send")
            getattr(communicator, name)(*pointers, counted, number, *arguments, stream.ptr)
            return source, result  # the caller keeps both until they are used

    def told(called):
        _, result = called
        return result.get(stream).astype(float).tolist()

    me.say(sum=told(called("allReduce", 3, 3, np.float32, nccl.NCCL_SUM)))
    me.say(max=told(called("allReduce", 3, 3, np.int32, nccl.NCCL_MAX)))
    me.say(avg=told(called("allReduce", 3, 3, ml_dtypes.bfloat16, nccl.NCCL_AVG)))
    me.say(prod=told(called("reduce", 3, 3, ml_dtypes.float8_e4m3fn, nccl.NCCL_PROD, 1)))
    me.say(broadcast=told(called("broadcast", 3, 3, np.int32, 2)))
    me.say(gathered=told(called("allGather", 1, 3, np.int32)))
    me.say(scattered=told(called("reduceScatter", 3, 1, np.int32, nccl.NCCL_SUM)))
    nccl.groupStart()
    sent = called("send", 2, 0, np.int32, (me.rank + 1) % 3)
    received = called("recv", 2, 2, np.int32, (me.rank + 2) % 3)
    nccl.groupEnd()
    del sent  # the stream uses it before it uses it for anything else
    me.say(received=told(received), unknown=me.attempt(communicator.allReduce, 0, 0, 1, 12, 0, stream.ptr)["error"])

    # Rank 2 goes: the others' calls hang their streams until they abort.
    if me.rank == 2:
        return
    kept = called("allReduce", 3, 3, np.float32, nccl.NCCL_SUM)
    after = cupy.cuda.Event()
    after.record(stream)
    time.sleep(0.2)
    me.say(hangs=not after.done)
    communicator.abort()
    after.synchronize()
    del kept
    me.say(went_on=after.done, gone=me.attempt(communicator.size)["error"])


def test_nccl(ranks: Ranks) -> None:
    said = [rank.said for rank in ranks.run(collectives, 3, env=on_gpus([0, 1, [4, 2]]))]
    for rank, one in enumerate(said):
        assert one["is_"] == [rank, 3, 0]
        assert (one["sum"], one["max"], one["avg"]) == ([3, 6, 9], [2, 3, 4], [1, 2, 3])
        assert one["prod"] == ([0, 6, 24] if rank == 1 else [0] * 3)
        assert (one["broadcast"], one["gathered"], one["scattered"]) == ([2, 3, 4], [0, 1, 2], [3 + 3 * rank])
        assert (one["received"], one["unknown"]) == ([(rank + 2) % 3, (rank + 2) % 3 + 1], "NcclError")
    for one in said[:2]:
        assert (one["hangs"], one["went_on"], one["gone"]) == (True, True, "NcclError")


def several(me: Me) -> None:
    """One process with several devices; then two ranks of one GPU."""
    import cupy
    from cupy.cuda import nccl

    arrays = []
    for device in range(2):
        with cupy.cuda.Device(device):
            arrays.append(cupy.full(2, device + 1.0))
            cupy.cuda.Stream.null.synchronize()
    communicators = nccl.NcclCommunicator.initAll(2)
    nccl.groupStart()
    for communicator, array in zip(communicators, arrays, strict=True):
        communicator.allReduce(array.data.ptr, array.data.ptr, 2, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, 0)
    nccl.groupEnd()
    results = []
    for device in range(2):
        with cupy.cuda.Device(device):
            results.append(arrays[device].get().tolist())
    me.say(results=results, devices=[one.device_id() for one in communicators])
    me.say(twice=me.attempt(nccl.NcclCommunicator.initAll, [1, 1])["text"])


def test_several_devices_and_one_twice(ranks: Ranks) -> None:
    (rank,) = ranks.run(several, 1, env=on_gpus([[0, 1]]))
    assert rank.said["results"] == [[3, 3], [3, 3]]
    assert rank.said["devices"] == [0, 1]
    assert rank.said["twice"].startswith("NCCL_ERROR_INVALID_USAGE")


def missing(me: Me) -> None:
    from rankmesh_agent.device import runtime as cuda

    me.say(gpu=cuda.unavailable_reason(), nccl=cuda.nccl_unavailable_reason())
    if me.rank == 0:
        me.say(ipc=me.attempt(lambda: cuda.memory_handle(cuda.malloc(8)))["error"])


def test_what_can_be_missing(ranks: Ranks) -> None:
    zero, one = ranks.run(missing, 2, env=on_gpus([0, []], without=["ipc", "nccl"]))
    assert (zero.said["gpu"], zero.said["ipc"]) == ("", "CUDARuntimeError")
    assert "without NCCL" in zero.said["nccl"]
    assert "no CUDA-capable device" in one.said["gpu"]


def test_its_names_and_parameters_are_cupys(ranks: Ranks) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    own = ranks.command(str(DOUBLE / "names.py"), name="double", **on_gpus([0])(0))
    ranks.succeed([own])
    names = json.loads(own.stdout)
    real = json.loads(subprocess.check_output([sys.executable, "-P", DOUBLE / "names.py", json.dumps(list(names))]))
    assert len(names) > 150
    assert [name for name in names if real[name] is None] == []
    for name, parameters in names.items():
        if "**" not in real[name]:
            assert [known for known in real[name] if known in parameters] == parameters, name
