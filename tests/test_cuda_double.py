"""The tests' double of CuPy and nccl4py: it is as asynchronous as a GPU, and orders what CUDA orders.

Its NCCL and its missing parts are what tests/gpu runs over; so they are not tested here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.gpus import DOUBLE, on_gpus
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
    me.report(late=[one.done, two.done], default_goes_on=other.get().tolist())
    never_waited = cupy.cuda.Stream(non_blocking=True)
    never_waited.wait_event(never)
    never_waited.synchronize()
    gate.set()
    two.synchronize()
    one.synchronize()  # the event happens a little before its work is done
    me.report(ordered=copy.get().tolist(), done=[one.done, two.done, event.done, never.done])

    gate.clear()
    blocking.launch_host_func(lambda _: gate.wait(), None)
    other.fill(3)
    null = cupy.cuda.Stream.null
    me.report(default_waits=not null.done)
    one.synchronize()
    gate.set()
    null.synchronize()
    gate.clear()
    null.launch_host_func(lambda _: gate.wait(), None)
    with blocking:
        other.fill(4)
    me.report(waits_for_default=not blocking.done)
    gate.set()
    me.report(last=other.get().tolist())


def test_streams_are_late_and_events_order_them(ranks: Ranks) -> None:
    (rank,) = ranks.run(streams, 1, env=on_gpus([0]))
    assert rank.reported == {
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
    me.report(wrong=wrong, freed=freed)


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_not_ordered_is_wrong_at_times(ranks: Ranks, ordered: bool) -> None:
    (rank,) = ranks.run(mistakes, 1, env=on_gpus([0], delay=0.005), ordered=ordered)
    assert {name: count > 0 for name, count in rank.reported.items()} == {"wrong": not ordered, "freed": not ordered}


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
    me.report(sizes=len(sizes), used=pool.used_bytes())
    me.report(full=me.attempt(cupy.empty, 1 << 22)["error"], alone=me.attempt(runtime.malloc, 1 << 24)["text"])
    me.report(shared_by=cuda.gpu_id(0))

    # What CuPy refuses, too
    narrow = cupy.zeros((2, 2), ml_dtypes.float8_e4m3fn)
    refused = [(np.asarray, array), (array.fill, np.ones(1000)), (array.__add__, np.ones(1000)), (narrow.fill, 1)]
    refused += [(cupy.ascontiguousarray, narrow.T), (hash, array)]
    me.report(refused=[me.attempt(*call)["error"] for call in refused], moved=(narrow.copy().get() == 0).all().item())
    me.report(same=cupy.from_dlpack(array[8:]).data.ptr - array.data.ptr, adopted=cupy.asarray(Foreign(array)).size)

    pinned = cupy.cuda.alloc_pinned_memory(80)
    host = np.frombuffer(pinned, np.float64, 10)
    gate = threading.Event()
    stream = cuda.create_stream()
    cuda.stream_object(stream).launch_host_func(lambda _: gate.wait(), None)
    cuda.copy_async(host.ctypes.data, array.data.ptr, 80, stream)
    host[:] = 0
    me.report(before=host.tolist(), is_there=cuda.event_completed(cuda.create_event()))
    gate.set()
    cuda.synchronize_stream(stream)
    me.report(after=(host - array[:10].get()).tolist())
    me.report(strided=array[1::3].flags.c_contiguous)


def test_memory_is_lent_again_and_belongs_to_allocations(ranks: Ranks) -> None:
    (rank,) = ranks.run(memory, 1, env=on_gpus([7], memory=1 << 23, delay=0))
    reported = rank.reported
    assert re.fullmatch(r".+/0000:\w\w:\w\w\.0", reported.pop("shared_by"))
    assert reported.pop("sizes") <= 2
    assert reported == {
        "used": 8192,
        "full": "OutOfMemoryError",
        "alone": "cudaErrorMemoryAllocation: out of memory",
        "refused": ["TypeError", "ValueError", "TypeError", "ValueError", "ValueError", "TypeError"],
        "moved": True,
        "same": 64,
        "adopted": 1000,
        "before": [0] * 10,
        "is_there": True,
        "after": [0] * 10,
        "strided": False,
    }


def lost(me: Me) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    pointer = runtime.malloc(64)
    stream = cupy.cuda.Stream()
    runtime.free(pointer)
    runtime.memsetAsync(pointer, 0, 64, stream.ptr)
    me.report(fails=me.attempt(stream.synchronize)["text"], still=me.attempt(cupy.empty, 1)["text"])


def test_memory_that_is_not_there_any_more_is_noticed(ranks: Ranks) -> None:
    (rank,) = ranks.start(lost, 1, env=on_gpus([0]))
    ranks.wait([rank])
    assert "memsetAsync" in rank.stderr.splitlines()[0]
    assert rank.reported["fails"].startswith("cudaErrorIllegalAddress")
    assert rank.reported["still"].startswith("cudaErrorIllegalAddress")


def test_its_names_and_parameters_are_those_of_cupy_and_nccl4py(ranks: Ranks) -> None:
    if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("nccl") is None:
        pytest.skip("CuPy or nccl4py is not installed")
    own = ranks.command(str(DOUBLE / "names.py"), name="double", **on_gpus([0])(0))
    ranks.succeed([own])
    names = json.loads(own.stdout)
    real = json.loads(subprocess.check_output([sys.executable, "-P", DOUBLE / "names.py", json.dumps(list(names))]))
    assert len(names) > 120
    assert [name for name in names if real[name] is None] == []
    for name, parameters in names.items():
        if "**" not in real[name]:
            assert [known for known in real[name] if known in parameters] == parameters, name
