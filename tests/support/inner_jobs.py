"""A rank of a launcher that starts a job of its own, and the ranks of that: ``inner_jobs.py HOW BACKEND``."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

from support.processes import free_port

NUMPY = "numpy"


def all_reduce(backend: str, value: float, **arguments: Any) -> float:
    if backend == NUMPY:
        import numpy as np

        import rankmesh as dist

        dist.init_process_group(**arguments)
        array: Any = np.full(3, value)
    else:
        import torch
        import torch.distributed as dist  # type: ignore[no-redef]

        dist.init_process_group(backend, **arguments)
        array = torch.full((3,), value)
    dist.all_reduce(array)
    found = float(array[0])
    dist.destroy_process_group()
    return found


def child(how: str, backend: str, value: float, number: int, port: int) -> None:
    if how == "tcp":
        report(all_reduce(backend, value, init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2))
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if how == "arguments":
        report(all_reduce(backend, value, rank=number, world_size=2))
        return
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    report(all_reduce(backend, value))


def report(found: float) -> None:
    print(f"outer {os.environ['OUTER']}: {found}\n", end="", flush=True)


def start(how: str, backend: str) -> None:
    outer = os.environ["OUTER"] = os.environ["RANK"]
    again = [__file__, "inner", backend]
    commands = {
        "launcher": [sys.executable, "-m", "rankmesh.run", "--nproc-per-node=2", *again],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *again],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *again],
    }
    if how in commands:
        sys.exit(subprocess.run(commands[how], check=False).returncode)
    fork = multiprocessing.get_context("fork")
    port = free_port()
    children = [fork.Process(target=child, args=(how, backend, float(outer), number, port)) for number in range(2)]
    for each in children:
        each.start()
    for each in children:
        each.join()
    sys.exit(any(each.exitcode for each in children))


if __name__ == "__main__":
    if sys.argv[1] == "inner":
        report(all_reduce(sys.argv[2], float(os.environ["OUTER"])))
    else:
        start(*sys.argv[1:])
