"""Asynchronous operations, and what they return."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from support.sides import Cells, plain

cell = Cells()


def calls(dist: Any, rank: int, size: int) -> dict[str, Any]:
    """Return each collective as a function that begins it, and returns its Work and what it fills."""

    def some(number: int = 0) -> torch.Tensor:
        return torch.arange(2.0) + number

    def many() -> list[torch.Tensor]:
        return [some(rank + each) for each in range(size)]

    def begin(name: str, filled: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(dist, name)(*arguments, async_op=True, **options), filled

    def at_root(tensors: list[torch.Tensor]) -> Any:
        return tensors if rank == 0 else None

    tensor, tensors, long = some(rank), many(), torch.zeros(2 * size)
    return {
        "all_reduce": lambda: begin("all_reduce", tensor, tensor),
        "reduce": lambda: begin("reduce", at_root([tensor]), tensor, 0),
        "broadcast": lambda: begin("broadcast", tensor, tensor, 0),
        "all_gather": lambda: begin("all_gather", tensors, tensors, tensor),
        "all_gather_into_tensor": lambda: begin("all_gather_into_tensor", long, long, tensor),
        "gather": lambda: begin("gather", at_root(tensors), tensor, at_root(tensors), 0),
        "scatter": lambda: begin("scatter", tensor, tensor, at_root(tensors), 0),
        "reduce_scatter": lambda: begin("reduce_scatter", tensor, tensor, tensors),
        "reduce_scatter_tensor": lambda: begin("reduce_scatter_tensor", tensor, tensor, torch.cat(tensors)),
        "all_to_all": lambda: begin("all_to_all", tensors, tensors, many()),
        "all_to_all_single": lambda: begin("all_to_all_single", long, long, torch.cat(tensors)),
        "barrier": lambda: begin("barrier", None),
    }


COLLECTIVES = [
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
]  # fmt: skip
SINGLE = {"all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
"""Those that fill one tensor and that gloo is not asked about."""


@cell(collective=COLLECTIVES, seconds=[None, 20, 0])
def wait(dist: Any, rank: int, size: int, collective: str, seconds: int | None) -> Any:
    """Zero is torch's default: the operation's own timeout. gloo's Work of a reduce_scatter never completes."""
    work, filled = calls(dist, rank, size)[collective]()
    waited = work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
    done: Any = work.is_completed(), work.is_success(), work.exception()
    if dist is torch.distributed and "reduce_scatter" in collective:
        done = True, True, None
    return waited, filled, work.wait(), isinstance(work, dist.Work), done


@cell(collective=COLLECTIVES)
def results(dist: Any, rank: int, size: int, collective: str) -> Any:
    """A Work's result and its future's value; gloo has none of a reduce_scatter, and views of its own of another."""
    work, filled = calls(dist, rank, size)[collective]()
    if dist is torch.distributed and ("reduce_scatter" in collective or collective == "all_gather_into_tensor"):
        return work.wait(), filled, filled
    future = work.get_future()
    future.wait()
    work.wait()
    if collective == "reduce" and rank:
        return future.done(), len(work.result())
    value = future.value()
    assert plain(work.result()) == plain(value)
    return future.done(), filled, value[0] if collective in SINGLE else value
