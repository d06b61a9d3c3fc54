"""Host time of calls on arrays on GPUs: ``python -m benchmarks.gpu_host`` prints microseconds a call; needs no GPU.

CUDA's own time is left out: the ranks run over a CuPy whose calls do nothing. Beside it: a NumPy array.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import rankmesh as dist
from benchmarks import null_cuda

RANKS = (1, 2)
_CALLS, _ROUNDS = 1000, 15
_LIMIT_SECONDS = 120.0


def measure(calls: int, rounds: int) -> None:
    """Measure all_reduce of four bytes, as a rank; rank 0 prints a row a kind of call."""
    null_cuda.install()
    dist.init_process_group("nccl")
    on_gpu, on_host = null_cuda.array(1, "float32"), np.zeros(1, np.float32)
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, on_gpu),
        "all_reduce(async_op=True), wait()": partial(_asynchronous, on_gpu),
        "all_reduce, NumPy": partial(dist.all_reduce, on_host),
    }
    for name, call in kinds.items():
        _microseconds(call, calls)
        found = [_microseconds(call, calls) for _ in range(rounds)]
        if dist.get_rank() == 0:
            row = dist.get_world_size(), dist.get_backend_config(), name, f"{statistics.median(found):.1f}"
            print(f"| {' | '.join(map(str, row))} | {min(found):.1f} |", flush=True)
    dist.destroy_process_group()


def _asynchronous(array: object) -> None:
    work = dist.all_reduce(array, async_op=True)
    assert work is not None
    work.wait()


def _microseconds(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def main() -> None:
    """Print the table, or as a rank take part in a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help="take part, as a rank that rankmesh run has started")
    parser.add_argument("--calls", type=int, default=_CALLS, help="in a round")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    given = parser.parse_args()
    if given.rank:
        measure(given.calls, given.rounds)
        return
    print("| ranks | backends | call | µs, median | least |\n|---|---|---|---|---|", flush=True)
    program = ["-m", "benchmarks.gpu_host", "--rank", f"--calls={given.calls}", f"--rounds={given.rounds}"]
    for ranks in RANKS:
        command = [sys.executable, "-m", "rankmesh.run", "--nproc-per-node", str(ranks), *program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_SECONDS, check=True)
        print("\n".join(re.findall(r"^\[rank 0\] (\|.*)$", done.stdout, re.MULTILINE)), flush=True)


if __name__ == "__main__":
    main()
