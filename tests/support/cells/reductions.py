"""Collectives that compute: every operation on every dtype."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
SOME = ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64"]


def contribution(rank: int, dtype: str) -> torch.Tensor:
    """Return what a rank contributes: numbers whose sums and products are exact in every dtype."""
    return torch.tensor([2 + 2 * rank, 1, 0, rank % 2, 4, rank + 2]).to(getattr(torch, dtype))


@cell(op=OPS, dtype=DTYPES)
def all_reduce(dist: Any, rank: int, size: int, op: str, dtype: str) -> Any:
    tensor = contribution(rank, dtype)
    returned = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return returned, tensor


@cell(op=OPS, dtype=SOME)
def reduce(dist: Any, rank: int, size: int, op: str, dtype: str) -> Any:
    """Each rank once is the root. What the others' tensors hold afterwards is up to the library."""
    results = []
    for root in range(size):
        tensor = contribution(rank, dtype)
        returned = dist.reduce(tensor, dst=root, op=getattr(dist.ReduceOp, op))
        results.append((returned, tensor if rank == root else None))
    return results


@cell(op=OPS, dtype=SOME)
def reduce_scatter(dist: Any, rank: int, size: int, op: str, dtype: str) -> Any:
    output = torch.empty(6, dtype=getattr(torch, dtype))
    inputs = [contribution(rank + part, dtype) for part in range(size)]
    return dist.reduce_scatter(output, inputs, op=getattr(dist.ReduceOp, op)), output


@cell(op=OPS, dtype=SOME)
def reduce_scatter_tensor(dist: Any, rank: int, size: int, op: str, dtype: str) -> Any:
    output = torch.empty(6, dtype=getattr(torch, dtype))
    parts = torch.cat([contribution(rank + part, dtype) for part in range(size)])
    return dist.reduce_scatter_tensor(output, parts, op=getattr(dist.ReduceOp, op)), output


@cell(function=["reduce_scatter_tensor", "reduce_scatter_single"])
def reduce_scatter_of_a_stack(dist: Any, rank: int, size: int, function: str) -> Any:
    output = torch.empty(3, 2)
    stack = torch.arange(6.0 * size).reshape(size, 3, 2) * (rank + 1)
    return getattr(dist, function)(output, stack), output


@cell(function=["reduce_scatter_tensor", "reduce_scatter_single"])
def reduce_scatter_of_a_concatenation(dist: Any, rank: int, size: int, function: str) -> Any:
    output = torch.empty(3, 2)
    rows = torch.arange(6.0 * size).reshape(size * 3, 2) * (rank + 1)
    return getattr(dist, function)(output, rows), output


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


@cell(op=["SUM", "AVG", "PRODUCT"])
def infinity_and_nan_are_passed_on(dist: Any, rank: int, size: int, op: str) -> Any:
    tensor = torch.tensor([float("inf"), float("nan"), -float("inf") if rank else 1.0, 3e38, -0.0])
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor


@cell(op=["MIN", "MAX"])
def infinity_has_an_order(dist: Any, rank: int, size: int, op: str) -> Any:
    tensor = torch.tensor([float("inf"), -float("inf") if rank else 1.0])
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor


@cell(op=["MIN", "MAX"])
def nan_has_none(dist: Any, rank: int, size: int, op: str) -> Any:
    tensor = torch.tensor([float("nan") if rank == 0 else 1.0, float("nan") if rank == size - 1 else 1.0])
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return tensor


@cell(op=OPS[:5], dtype=["float16", "bfloat16"])
def half_types_are_rounded(dist: Any, rank: int, size: int, op: str, dtype: str) -> Any:
    tensor = torch.tensor([0.1 + rank, 2049.0, 1 / 3], dtype=getattr(torch, dtype))
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


@cell()
def all_reduce_coalesced_of_several_dtypes(dist: Any, rank: int, size: int) -> Any:
    tensors = [torch.arange(3) + rank, torch.full((2, 2), float(rank))]
    dist.all_reduce_coalesced(tensors)
    return tensors


@cell()
def coalescing_all_reduce(dist: Any, rank: int, size: int) -> Any:
    tensors = [torch.full((each + 1,), float(rank)) for each in range(4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@cell()
def coalescing_all_reduce_asynchronously(dist: Any, rank: int, size: int) -> Any:
    tensors = [torch.full((each + 1,), float(rank)) for each in range(4)]
    with dist._coalescing_manager(async_ops=True) as made:
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return made.wait(), tensors


@cell()
def coalescing_reduce_scatter(dist: Any, rank: int, size: int) -> Any:
    outputs = [torch.empty(2) for _ in range(3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.arange(2.0 * size) + rank)
    return outputs


@cell(dtype=["int64", "float32", "complex64"])
def premultiplied(dist: Any, rank: int, size: int, dtype: str) -> Any:
    """Each rank with a factor of its own."""
    tensor = contribution(rank, dtype)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(rank + 2))
    return tensor


@cell()
def the_deprecated_reduce_op(dist: Any, rank: int, size: int) -> Any:
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, op=dist.reduce_op.PRODUCT)
    return tensor


@cell()
def the_operations(dist: Any, rank: int, size: int) -> Any:
    ops = dist.ReduceOp
    same = ops.SUM == ops.SUM, ops.SUM != ops.MAX, dist.reduce_op.SUM == ops.SUM
    return same, len({ops.SUM, ops.MAX, ops.SUM}), [hasattr(ops, op) for op in [*OPS, "PREMUL_SUM"]]


@cell(sizes=(1,))
def names_of_operations(dist: Any, rank: int, size: int) -> Any:
    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
    return [(str(getattr(dist.ReduceOp, name)), f"{getattr(dist.ReduceOp, name)}") for name in names]
