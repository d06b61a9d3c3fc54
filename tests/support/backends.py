"""The same code over torch.distributed's backends gloo and rankmesh, one after the other in the same processes.

For each of the worlds' sizes and each backend, a process joins a world, unless that has fewer ranks, runs the cells of
some modules there (see support.sides), and writes down what came: values with their tensors, or the exception.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.processes import Me, Ranks
from support.sides import Cell, cells_of

BACKENDS = ("gloo", "rankmesh")
TIMEOUT = timedelta(seconds=60)
SECONDS = 480.0

Results = dict[str, list[Any]]
"""By cell and then by rank: what it returned, or the exception as ``{"error": class, "text": what it says}``."""


def run_cells(ranks: Ranks, modules: Sequence[str], sizes: Sequence[int]) -> dict[tuple[int, str], Results]:
    """Run the cells of some modules in as many processes as the largest world has; return what came, by world.

    Args:
        ranks: starts them.
        modules: whose cells.
        sizes: of the worlds.
    """
    started = ranks.start(be_a_rank, max(sizes), sizes=sizes, modules=modules)
    ranks.wait(started, seconds=SECONDS)
    for rank in started:
        complaints = [word for word in ("Traceback", "Exception", "[rankmesh]") if word in rank.stderr]
        assert (rank.code, complaints) == (0, []), ranks.transcript()  # torch's own log and warnings are there, too
    return {(size, backend): _results(ranks.folder, backend, size) for size in sizes for backend in BACKENDS}


def _results(folder: Path, backend: str, size: int) -> Results:
    by_rank = [torch.load(_path(folder, backend, size, rank)) for rank in range(size)]
    return {name: [rank.get(name) for rank in by_rank] for name in by_rank[0]}


def _path(folder: Path, backend: str, size: int, rank: int) -> Path:
    return folder / f"{backend}-{size}-{rank}.pt"


def world(backend: str, rank: int, size: int, folder: Path, cells: dict[str, Cell]) -> None:
    """Be a rank of a world of one backend: run the cells, up to the first that fails here, and write down what came."""
    store = dist.FileStore(str(folder / f"{backend}-{size}"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    assert dist.get_backend() == backend
    told: dict[str, Any] = {}
    for name, cell in cells.items():
        try:
            told[name] = cell(dist, rank, size)
        except Exception as error:
            told[name] = {"error": type(error).__name__, "text": str(error)}
            break  # the ranks are not together any more
        finally:
            torch.save(told, _path(folder, backend, size, rank))
    dist.destroy_process_group()


def be_a_rank(me: Me, sizes: Sequence[int], modules: Sequence[str]) -> None:
    """Be a rank of all the worlds that have it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, of what is still a prototype there
    for size in sorted(sizes, reverse=True):  # no rank waits for those in a smaller world
        for backend in BACKENDS:
            if me.rank < size:
                world(backend, me.rank, size, me.folder, cells_of(modules, size))
    sys.stderr.flush()
    os._exit(0)  # gloo's threads, if torch keeps a group of it to the end, may abort a process that ends as usual
