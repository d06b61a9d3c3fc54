"""Functional collectives, which find the group by its name and call it from C++, and those that autograd follows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as autograd

from support.sides import Cells

cell = Cells(in_groups=True)

PAIR = (2,)
"""The first call loads much of torch, seconds of it."""


def row(rank: int, count: int = 4) -> torch.Tensor:
    return torch.arange(count) + 10.0 * rank


@cell(sizes=(2, 3))
def each_call(group: Any, rank: int, size: int) -> Any:
    """torch's code between these functions and the group's methods is its own: one call of each shows the seam."""
    sends = [each + 1 for each in range(size)]
    results = [
        *(functional.all_reduce(row(rank), op, group) for op in ("sum", "avg", "max", "product")),
        functional.broadcast(row(rank), size - 1, group),
        functional.all_gather_tensor(row(rank).reshape(2, 2), 1, group),
        functional.reduce_scatter_tensor(row(rank, 4 * size * size).reshape(2 * size, 2 * size), "sum", 1, group),
        functional.all_to_all_single(row(rank, 2 * size), None, None, group),
        functional.all_to_all_single(row(rank, sum(sends)), [rank + 1] * size, sends, group),
        functional.permute_tensor(row(rank), [(each + 1) % size for each in range(size)], group),
    ]
    return [functional.wait_tensor(each) for each in results]


@cell(sizes=PAIR)
def coalesced(group: Any, rank: int, size: int) -> Any:
    results = [
        *functional.all_reduce_coalesced([row(rank), row(rank, 2)], "sum", group),
        *functional.all_gather_into_tensor_coalesced([row(rank), row(rank, 2)], group),
        *functional.reduce_scatter_tensor_coalesced([row(rank, 4 * size), row(rank, 2 * size)], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(each) for each in results]


@cell(sizes=PAIR)
def results_used_without_waiting(group: Any, rank: int, size: int) -> Any:
    """They are tensors that wait by themselves."""
    return functional.all_reduce(row(rank), "sum", group) * 2 + functional.all_reduce(row(rank), "max", group)


@cell(sizes=PAIR)
def operators_by_name(group: Any, rank: int, size: int) -> Any:
    ops = torch.ops._c10d_functional
    kept = row(rank)
    ops.wait_tensor(ops.all_reduce_(kept, "sum", group.group_name))
    whole = ops.wait_tensor(ops.all_gather_into_tensor(row(rank), size, group.group_name))
    return kept, whole


@cell(sizes=PAIR)
def with_gradients(group: Any, rank: int, size: int) -> Any:
    gathered, scattered = row(rank).requires_grad_(), row(rank, 4 * size).requires_grad_()
    swapped = row(rank, 2 * size).requires_grad_()
    results = [
        functional.all_gather_tensor_autograd(gathered, 0, group),
        functional.reduce_scatter_tensor_autograd(scattered, "sum", 0, group),
        functional.all_to_all_single_autograd(swapped, [2] * size, [2] * size, group),
    ]
    for number, result in enumerate(results):
        (result * (rank + number + 1)).sum().backward()
    return [result.detach() for result in results], gathered.grad, scattered.grad, swapped.grad


@cell(sizes=PAIR)
def the_older_ones_with_gradients(group: Any, rank: int, size: int) -> Any:
    """torch.distributed.nn; its gather and its list of all ranks' parts are made of other calls."""
    mine, parts = row(rank).requires_grad_(), [row(rank + each).requires_grad_() for each in range(size)]
    results = [
        autograd.all_reduce(mine, group=group),
        autograd.broadcast(mine, 0, group),
        *autograd.all_gather(mine, group),
        autograd.reduce_scatter(torch.zeros(4), parts, group=group),
        *autograd.all_to_all([torch.zeros(4) for _ in range(size)], parts, group),
    ]
    sum((result * (rank + number)).sum() for number, result in enumerate(results)).backward()
    return [result.detach() for result in results], mine.grad, [part.grad for part in parts]


@cell(sizes=PAIR, sides=("over",))
def in_a_compiled_function(group: Any, rank: int, size: int) -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", group) + 1

    assert step(row(rank)).tolist() == (2 * sum(row(each) for each in range(size)) + 1).tolist()


@cell(sizes=PAIR)
def a_mesh_of_devices(group: Any, rank: int, size: int) -> Any:
    mesh = c10d.device_mesh.DeviceMesh.from_group(group, "cpu")
    tensor = torch.arange(12.0).reshape(6, 2)
    shards = c10d.tensor.distribute_tensor(tensor, mesh, [c10d.tensor.Shard(0)])
    return shards.to_local(), (shards + 1).full_tensor(), shards.sum().full_tensor()
