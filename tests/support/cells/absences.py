"""Ranks that do not come in time: the other one waits as long as it was told to, and is told who is missing."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from support.processes import wait_until
from support.sides import Cells

cell = Cells()

SOON = timedelta(seconds=0.3)
SHORT = timedelta(seconds=4)
"""Time for making a group, too."""


@cell(sizes=(2, 3), waits=["for the first", "for all"])
def a_monitored_barrier(dist: Any, rank: int, size: int, waits: str) -> Any:
    group = dist.new_group()
    if rank == 0:
        dist.monitored_barrier(group, timeout=SOON, wait_all_ranks=waits == "for all")


@cell(sizes=(2,))
def a_barrier_with_a_timeout(dist: Any, rank: int, size: int) -> Any:
    group = dist.new_group()
    if rank == 0:
        dist.barrier(group, timeout=SOON)


@cell(sizes=(2,), call=["all_reduce", "all_gather_object", "recv"])
def a_call_in_a_group_with_a_timeout(dist: Any, rank: int, size: int, call: str) -> Any:
    group = dist.new_group(timeout=SHORT)
    if rank == 0:
        {
            "all_reduce": lambda: dist.all_reduce(torch.ones(4), group=group),
            "all_gather_object": lambda: dist.all_gather_object([None, None], 1, group),
            "recv": lambda: dist.recv(torch.ones(4), 1, group),
        }[call]()


@cell(sizes=(2,))
def waiting_for_a_work(dist: Any, rank: int, size: int) -> Any:
    """The operation goes on after the wait."""
    given_up = Path(f"given-up-{dist.__name__}")
    if rank == 1:
        wait_until(given_up.exists, "rank 0")
    work = dist.all_reduce(tensor := torch.full((2,), rank + 1.0), async_op=True)
    if rank == 0:
        try:
            work.wait(SOON)
        finally:
            given_up.touch()
            _works[dist] = work, tensor
    return work.wait(), tensor


_works: dict[Any, Any] = {}


@cell(sizes=(2,))
def the_work_after_that(dist: Any, rank: int, size: int) -> Any:
    if rank == 1:
        return None
    work, tensor = _works[dist]
    return work.wait(), tensor


@cell(sizes=(2,))
def the_world_after_all_that(dist: Any, rank: int, size: int) -> Any:
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    return tensor
