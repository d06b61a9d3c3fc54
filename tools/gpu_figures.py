"""Figures of arrays on GPUs beside their targets, and a rank that is killed; tools/gpu_session.py runs them all.

    rankmesh run --nproc-per-node 2 -m tools.gpu_figures figures
    python -m tools.gpu_figures killed      # starts its own jobs

A line ``result: ...`` has what was measured; a target that is missed is no error.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import rankmesh as dist
from benchmarks.gpu import bare_all_reduce
from tools.gpu_report import all_reduce_async, join, result, run, seconds, target

MIB = 1 << 20
OVERHEAD_US, DEATH_SECONDS = 5.0, 2.0
"""Targets of docs/gpu.md."""
_VICTIM = 1
_FOLDER = "GPU_FIGURES_FOLDER"


def overhead(small: bool) -> None:
    """Measure NCCL with one rank beside bare calls: host time of a call, the queue never full."""
    import cupy
    from cupy.cuda import get_current_stream

    join()
    array, stream = cupy.zeros(1, "float32"), get_current_stream()
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(dist.all_reduce, array),
        "bare": bare_all_reduce(dist, array, stream.ptr),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5 if small else 50):
        for name, call in calls.items():
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                call()
            samples[name].append((time.perf_counter() - began) / 100 * 1e6)
    stream.synchronize()
    ours, alone = (statistics.median(samples[name]) for name in ("ours", "bare"))
    text = f"NCCL, one rank, 4 B: {ours:.1f} µs a call, {alone:.1f} by nccl4py alone: {ours - alone:.1f} µs more"
    target(text, ours - alone <= OVERHEAD_US, f"{OVERHEAD_US:g} µs")
    dist.destroy_process_group()


def figures(small: bool) -> None:
    """Measure ranks on one GPU: bandwidth, latency, and the device's memory after a thousand calls."""
    join()
    _bandwidth(4 * MIB if small else 256 * MIB)
    _latency(50 if small else 2000)
    _growth(50 if small else 1000)
    dist.destroy_process_group()


def _bandwidth(nbytes: int) -> None:
    import cupy

    cuda, stream, size = cupy.cuda.runtime, cupy.cuda.get_current_stream(), dist.get_world_size()
    array = cupy.zeros(nbytes // 4, "float32")
    ours = seconds(partial(dist.all_reduce, array), 3, stream.synchronize)
    copied = 0.0
    if dist.get_rank() == 0:
        other = cupy.empty_like(array)
        copy = partial(cuda.memcpyAsync, other.data.ptr, array.data.ptr, nbytes, cuda.memcpyDeviceToDevice, stream.ptr)
        copied = seconds(copy, 10, stream.synchronize)
    dist.barrier()
    text = f"all_reduce of {nbytes // MIB} MiB, {size} ranks on one GPU: {ours * 1e6:.0f} µs"
    result(f"{text}; a device copy takes {copied * 1e6:.0f} µs")


def _latency(calls: int) -> None:
    import cupy

    array = cupy.zeros(1, "float32")
    returned, ended = _microseconds(partial(dist.all_reduce, array), calls)
    median, late = statistics.median(ended), sorted(ended)[len(ended) * 99 // 100]
    result(f"4 B, {dist.get_world_size()} ranks: {median:.1f} µs from call to result, 99th percentile {late:.1f}")
    result(f"of it on the host, until the call returns: {statistics.median(returned):.1f} µs")


def _microseconds(call: Callable[[], object], calls: int) -> tuple[list[float], list[float]]:
    """Return, for each of many calls, the time until it returned and until the GPU had completed it."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    returned, ended = [], []
    for _ in range(calls + 20):
        began = time.perf_counter()
        call()
        returned.append((time.perf_counter() - began) * 1e6)
        stream.synchronize()
        ended.append((time.perf_counter() - began) * 1e6)
    return returned[20:], ended[20:]


def _growth(calls: int) -> None:
    import cupy

    def free() -> int:
        cupy.cuda.get_current_stream().synchronize()
        dist.barrier()
        return int(cupy.cuda.runtime.memGetInfo()[0])

    arrays = [cupy.zeros(MIB // 4, "float32") for _ in range(4)]

    def some(number: int) -> None:
        for turn in range(number):
            dist.all_reduce(arrays[turn % 4])
            all_reduce_async(arrays[turn % 4][::2]).wait()
            cupy.cuda.get_current_stream().synchronize()

    some(calls // 4)
    before = free()
    some(calls)
    grown = before - free()
    target(f"the device's memory after {calls} iterations: {grown} bytes more", grown <= 0, "0")


# A rank that is killed


def killed(small: bool) -> None:
    """Kill a rank of three in mid-call: the others' errors name it in time, and a new job can use the GPU."""
    options = ["--small"] if small else []
    job = [sys.executable, "-m", "rankmesh.run", "--nproc-per-node"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*job, "3", "-m", "tools.gpu_figures", "victim", *options]
        subprocess.run(command, env={**os.environ, _FOLDER: folder}, timeout=60, check=False)
        died = float(Path(folder, "died").read_text())
        for rank in (0, 2):
            found = json.loads(Path(folder, f"rank-{rank}").read_text())
            late = found["at"] - died
            named = found["error"] == "RankFailedError" and f"rank {_VICTIM}" in found["text"]
            text = f"rank {_VICTIM} killed in mid-call: {'named' if named else 'NOT NAMED'} at rank {rank}"
            target(f"{text} after {late:.2f} s", named and late <= DEATH_SECONDS, f"{DEATH_SECONDS:g} s")
            print(f"{found['error']}: {found['text']}", flush=True)
    done = subprocess.run([*job, "2", "-m", "tools.gpu_checks", "results", *options], timeout=60, check=False)
    result(f"a new job on the GPU ended with exit code {done.returncode}")
    sys.exit(done.returncode)


def victim(small: bool) -> None:
    """Call until a rank is killed; write the error and its time, which CLOCK_MONOTONIC gives all processes."""
    import cupy

    join()
    rank, folder = dist.get_rank(), Path(os.environ[_FOLDER])
    array = cupy.zeros((MIB if small else 64 * MIB) // 4, "float32")

    def die() -> None:
        (folder / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == _VICTIM:
        threading.Timer(0.5, die).start()
    try:
        while True:  # on the host, as streams may wait for the dead rank for ever
            all_reduce_async(array).wait(timedelta(seconds=30))
    except Exception as error:
        report = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
        (folder / f"rank-{rank}").write_text(json.dumps(report))
    os._exit(0)  # without a synchronization with the GPU


if __name__ == "__main__":
    run((overhead, figures, killed, victim), __doc__)
