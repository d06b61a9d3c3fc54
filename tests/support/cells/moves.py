"""Collectives that move data: broadcast, all_gather, gather, scatter, all_to_all, and the barriers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from support.sides import Cells

cell = Cells()

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def numbers(rank: int, dtype: str = "float32") -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + rank).to(getattr(torch, dtype))


def holes(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor to be filled."""
    return torch.zeros_like(like)


@cell(dtype=DTYPES)
def broadcast(dist: Any, rank: int, size: int, dtype: str) -> Any:
    results = []
    for src in range(size):
        tensor = numbers(rank, dtype)
        results.append((dist.broadcast(tensor, src=src), tensor))
    return results


@cell()
def broadcast_from_a_group_rank(dist: Any, rank: int, size: int) -> Any:
    tensor = numbers(rank)
    dist.broadcast(tensor, group_src=size - 1)
    return tensor


@cell(dtype=DTYPES)
def all_gather(dist: Any, rank: int, size: int, dtype: str) -> Any:
    tensor = numbers(rank, dtype)
    tensor_list = [holes(tensor) for _ in range(size)]
    return dist.all_gather(tensor_list, tensor), tensor_list


@cell()
def all_gather_of_another_shape(dist: Any, rank: int, size: int) -> Any:
    tensor_list = [torch.zeros(6) for _ in range(size)]
    dist.all_gather(tensor_list, numbers(rank))
    return tensor_list


@cell()
def all_gather_of_uneven_sizes(dist: Any, rank: int, size: int) -> Any:
    tensor_list = [torch.zeros(each + 1) for each in range(size)]
    dist.all_gather(tensor_list, torch.full((rank + 1,), float(rank)))
    return tensor_list


@cell()
def all_gather_into_views_of_one_tensor(dist: Any, rank: int, size: int) -> Any:
    whole = torch.zeros(size, 4)
    dist.all_gather(list(whole.unbind()), torch.full((4,), float(rank)))
    return whole


@cell()
def all_gather_into_a_tuple(dist: Any, rank: int, size: int) -> Any:
    outputs = tuple(torch.zeros(4) for _ in range(size))
    dist.all_gather(outputs, torch.full((4,), float(rank)))
    return outputs


@cell(function=["all_gather_into_tensor", "all_gather_single"], shape=["concatenation", "stack"])
def all_gather_into_one(dist: Any, rank: int, size: int, function: str, shape: str) -> Any:
    output = torch.zeros(size * 2, 3) if shape == "concatenation" else torch.zeros(size, 2, 3)
    return getattr(dist, function)(output, numbers(rank)), output


@cell()
def all_gather_into_tensor_of_its_own_part(dist: Any, rank: int, size: int) -> Any:
    output = torch.zeros(size, 4, dtype=torch.int64)
    output[rank] = rank + 1
    dist.all_gather_into_tensor(output, output[rank])
    return output


@cell(dtype=DTYPES)
def gather(dist: Any, rank: int, size: int, dtype: str) -> Any:
    results = []
    for dst in range(size):
        tensor = numbers(rank, dtype)
        gather_list = [holes(tensor) for _ in range(size)] if rank == dst else None
        results.append((dist.gather(tensor, gather_list, dst=dst), gather_list))
    return results


@cell()
def gather_at_the_default_rank(dist: Any, rank: int, size: int) -> Any:
    gather_list = [torch.zeros(2, 3) for _ in range(size)] if rank == 0 else []
    dist.gather(numbers(rank), gather_list)
    return gather_list


@cell()
def gather_at_a_group_rank(dist: Any, rank: int, size: int) -> Any:
    gather_list = [torch.zeros(2, 3) for _ in range(size)] if rank == size - 1 else None
    dist.gather(numbers(rank), gather_list, group_dst=size - 1)
    return gather_list


@cell(dtype=DTYPES)
def scatter(dist: Any, rank: int, size: int, dtype: str) -> Any:
    results = []
    for src in range(size):
        tensor = holes(numbers(rank, dtype))
        scatter_list = [numbers(10 * src + each, dtype) for each in range(size)] if rank == src else None
        results.append((dist.scatter(tensor, scatter_list, src=src), tensor))
    return results


@cell()
def scatter_from_the_default_rank(dist: Any, rank: int, size: int) -> Any:
    tensor = torch.zeros(2, 3)
    dist.scatter(tensor, [numbers(each) for each in range(size)] if rank == 0 else [])
    return tensor


@cell()
def scatter_from_a_group_rank(dist: Any, rank: int, size: int) -> Any:
    tensor = torch.zeros(2, 3)
    dist.scatter(tensor, [numbers(each) for each in range(size)] if rank == size - 1 else None, group_src=size - 1)
    return tensor


@cell(dtype=["int64", "float32", "bool", "bfloat16", "complex64"])
def all_to_all(dist: Any, rank: int, size: int, dtype: str) -> Any:
    inputs = [numbers(10 * rank + to, dtype) for to in range(size)]
    outputs = [holes(each) for each in inputs]
    return dist.all_to_all(outputs, inputs), outputs


@cell()
def all_to_all_of_uneven_sizes(dist: Any, rank: int, size: int) -> Any:
    inputs = [torch.full((rank + 2 * to,), 10 * rank + to) for to in range(size)]
    outputs = [torch.zeros(sender + 2 * rank, dtype=torch.int64) for sender in range(size)]
    dist.all_to_all(outputs, inputs)
    return outputs


@cell(dtype=DTYPES)
def all_to_all_single(dist: Any, rank: int, size: int, dtype: str) -> Any:
    tensor = (torch.arange(2 * size) + 4 * rank).to(getattr(torch, dtype))
    output = holes(tensor)
    return dist.all_to_all_single(output, tensor), output


@cell()
def all_to_all_single_with_splits(dist: Any, rank: int, size: int) -> Any:
    """The documentation's example: rank r sends r + 1 rows to its first peer, and one row less or more to the next."""
    sends = [(rank + to) % 3 for to in range(size)]
    expects = [(sender + rank) % 3 for sender in range(size)]
    rows = torch.arange(2.0 * sum(sends)).reshape(-1, 2) + 100 * rank
    output = torch.zeros(sum(expects), 2)
    return dist.all_to_all_single(output, rows, expects, sends), output


@cell()
def all_to_all_single_with_splits_of_one_side(dist: Any, rank: int, size: int) -> Any:
    output = torch.zeros(2 * size)
    dist.all_to_all_single(output, torch.arange(2.0 * size) + rank, input_split_sizes=[2] * size)
    dist.all_to_all_single(output, output.clone(), output_split_sizes=[2] * size, input_split_sizes=[])
    return output


@cell(count=[1, 3])
def all_gather_coalesced(dist: Any, rank: int, size: int, count: int) -> Any:
    inputs = [torch.full((each + 1,), float(rank)) for each in range(count)]
    outputs = [[torch.zeros(each + 1) for each in range(count)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    return outputs


@cell()
def coalescing_all_gather(dist: Any, rank: int, size: int) -> Any:
    outputs = [torch.zeros(size * (each + 1)) for each in range(3)]
    with dist._coalescing_manager():
        for each, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((each + 1,), float(rank)))
    return outputs


@cell()
def barrier(dist: Any, rank: int, size: int) -> Any:
    return dist.barrier(), dist.barrier(async_op=True).wait()


@cell()
def monitored_barrier(dist: Any, rank: int, size: int) -> Any:
    results = [dist.monitored_barrier(), dist.monitored_barrier(timeout=timedelta(seconds=20))]
    return [*results, dist.monitored_barrier(wait_all_ranks=True)]
