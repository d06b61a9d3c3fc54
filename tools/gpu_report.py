"""What the programs for GPUs have in common: joining a job, timing, printing of results and targets."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import rankmesh as dist


def result(text: str) -> None:
    """Print a result, at one rank of a job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"result: {text}", flush=True)


def target(text: str, met: bool, wanted: str) -> None:
    """Print a figure beside its target."""
    result(f"{text} (target {wanted}: {'met' if met else 'MISSED'})")


def join() -> tuple[str, range]:
    """Join the job, over NCCL or as GPU_ENGINE says. Return the backend for arrays on GPUs, and the ranks.

    Raises:
        RuntimeError: the job selected another backend.
    """
    import cupy

    wanted = os.environ.get("GPU_ENGINE", "nccl")
    dist.init_process_group("nccl" if wanted == "nccl" else "gloo", timeout=60)
    cupy.cuda.Stream(non_blocking=True).use()
    dist.all_reduce(cupy.zeros(1, "float32"))
    config = dist.get_backend_config()
    if f"cuda:{'nccl' if wanted == 'nccl' else 'mesh'}" not in config:
        raise RuntimeError(f"arrays on GPUs go over {config}, not over {wanted}")
    return "NCCL" if wanted == "nccl" else "host memory", range(dist.get_world_size())


def all_reduce_async(array: Any, timeout: float | None = None) -> dist.Work:
    """Begin all_reduce of an array."""
    work = dist.all_reduce(array, async_op=True, timeout=timeout)
    assert work is not None  # as at ranks outside of the group
    return work


def seconds(call: Callable[[], object], calls: int, finish: Callable[[], object]) -> float:
    """Return the median seconds of a call, of several rows of calls."""
    call()
    finish()
    rows = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        finish()
        rows.append((time.perf_counter() - began) / calls)
    return statistics.median(rows)


def run(programs: Sequence[Callable[[bool], object]], text: str | None) -> None:
    """Run the program that the command line names."""
    by_name = {program.__name__: program for program in programs}
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=by_name)
    parser.add_argument("--small", action="store_true", help="small arrays and few calls: for the double of CuPy")
    options = parser.parse_args()
    by_name[options.program](options.small)
