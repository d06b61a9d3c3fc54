"""Collectives that compute; tests/torch/test_sweep_torch.py has every operation on every dtype."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def contribution(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank contributes: numbers whose sums and products are exact in every dtype."""
    return torch.tensor([2 + 2 * rank, 1, 0, rank % 2, 4, rank + 2]).to(dtype)


@cell(op=OPS[:-1])
def each_operation(dist: Any, rank: int, size: int, op: str) -> Any:
    """What the other ranks' tensors hold after a reduce is up to the library."""
    dtype = torch.int64 if op.startswith("B") else torch.float32
    reduced, at_root, part, row = (contribution(rank, dtype) for _ in range(4))
    inputs = [contribution(rank + each, dtype) for each in range(size)]
    chosen = {"op": getattr(dist.ReduceOp, op)}
    return (
        (dist.all_reduce(reduced, **chosen), reduced),
        (dist.reduce(at_root, size - 1, **chosen), at_root if rank == size - 1 else None),
        (dist.reduce_scatter(part, inputs, **chosen), part),
        (dist.reduce_scatter_tensor(row, torch.cat(inputs), **chosen), row),
    )


@cell(function=["reduce_scatter_tensor", "reduce_scatter_single"])
def reduce_scatter_of_a_concatenation(dist: Any, rank: int, size: int, function: str) -> Any:
    """The same is right for a stack, which gloo refuses."""
    output, stacked = torch.empty(3, 2), torch.empty(3, 2)
    rows = torch.arange(6.0 * size).reshape(size * 3, 2) * (rank + 1)
    getattr(dist, function)(output, rows)
    if dist is not torch.distributed:
        getattr(dist, function)(stacked, rows.reshape(size, 3, 2))
        assert stacked.equal(output)
    return output


@cell()
def reduce_scatter_of_uneven_parts(dist: Any, rank: int, size: int) -> Any:
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.full((part + 1,), 10.0**rank) for part in range(size)])
    return output


@cell()
def sums_that_wrap_around(dist: Any, rank: int, size: int) -> Any:
    results = []
    for dtype, value in ((torch.uint8, 200), (torch.int8, 100), (torch.int32, 2**31 - 1), (torch.int64, 2**63 - 1)):
        tensor = torch.tensor([value, -1 if dtype.is_signed else 255], dtype=dtype)
        dist.all_reduce(tensor)
        results.append(tensor)
    return results


@cell(op=["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def infinity_and_nan_are_passed_on(dist: Any, rank: int, size: int, op: str) -> Any:
    """With gloo the order of the ranks decides whether MIN and MAX see a NaN of one rank."""
    tensor = torch.tensor([float("inf"), float("nan"), -float("inf") if rank else 1.0, 3e38, -0.0])
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor


@cell(op=["SUM", "MAX"])
def a_long_tensor(dist: Any, rank: int, size: int, op: str) -> Any:
    tensor = (torch.arange(300_001) % 1000).to(torch.float32) * (rank + 1)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor.sum(dtype=torch.float64).item(), tensor[::50_000]


@cell(op=["SUM", "MIN"])
def all_reduce_coalesced(dist: Any, rank: int, size: int, op: str) -> Any:
    tensors = [torch.arange(3) + rank, torch.full((2, 2), rank), torch.tensor(rank)]
    dist.all_reduce_coalesced(tensors, op=getattr(dist.ReduceOp, op))
    return tensors


@cell(async_ops=[False, True])
def coalescing(dist: Any, rank: int, size: int, async_ops: bool) -> Any:
    tensors = [torch.full((each + 1,), float(rank)) for each in range(4)]
    outputs = [torch.empty(2) for _ in range(3)]
    with dist._coalescing_manager(async_ops=async_ops) as made:
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    waited = made.wait() if async_ops else None
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.arange(2.0 * size) + rank)
    return waited, tensors, outputs


@cell()
def the_deprecated_reduce_op(dist: Any, rank: int, size: int) -> Any:
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, op=dist.reduce_op.PRODUCT)
    return tensor


@cell(sizes=(1,))
def the_operations(dist: Any, rank: int, size: int) -> Any:
    ops = dist.ReduceOp
    same = ops.SUM == ops.SUM, ops.SUM != ops.MAX, dist.reduce_op.SUM == ops.SUM
    named = [(str(getattr(ops, name)), f"{getattr(ops, name)}") for name in OPS]
    return same, len({ops.SUM, ops.MAX, ops.SUM}), named
