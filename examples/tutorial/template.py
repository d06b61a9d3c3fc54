"""The tutorial's ``run.py``: start a function as several ranks on this machine. By itself, each rank says hello."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import rankmesh as dist

Function = Callable[[int, int], None]
"""Body of each process, called with its rank and the world size."""


def init_process(rank: int, size: int, port: int, function: Function) -> None:
    """Initialize the distributed environment and run the function; the body of each process."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        function(rank, size)
    finally:
        dist.destroy_process_group()


def launch(function: Function, size: int) -> None:
    """Run the function in ``size`` processes and wait for all of them.

    Raises:
        SystemExit: with code 1 when one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as reserved:
        # Until rank 0 listens there, nobody else is given the port: it is bound. Rank 0 may bind it, too.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        processes = [context.Process(target=init_process, args=(rank, size, port, function)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def run(rank: int, size: int) -> None:
    """Say that the rank is there; each of the tutorial's programs has a function of its own in this place."""
    print(f"Rank {rank} of {size} is here")


if __name__ == "__main__":
    launch(run, size=2)
