"""Collectives that move data, in the forms that torch's own tests (test_suite.py) and the sweep do not have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from support.sides import Cells

cell = Cells()
OURS = ("rankmesh", "over")
"""Sides of calls that gloo refuses: such cells check for themselves."""


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + rank


def zeros(count: int) -> list[torch.Tensor]:
    return [torch.zeros(2, 3) for _ in range(count)]


@cell()
def broadcast(dist: Any, rank: int, size: int) -> Any:
    tensors = [numbers(rank) for _ in range(size)]
    returned = [dist.broadcast(tensor, src=src) for src, tensor in enumerate(tensors[:-1])]
    return returned, dist.broadcast(tensors[-1], group_src=size - 1), tensors


@cell()
def all_gather(dist: Any, rank: int, size: int) -> Any:
    outputs, whole = zeros(size), torch.zeros(size, 4)
    dist.all_gather(list(whole.unbind()), torch.full((4,), float(rank)))
    return dist.all_gather(outputs, numbers(rank)), outputs, whole


@cell(sides=OURS)
def all_gather_of_other_shapes_and_uneven_sizes(dist: Any, rank: int, size: int) -> Any:
    """As with NCCL; of a shape, only the number of elements counts."""
    outputs, uneven = [torch.zeros(6) for _ in range(size)], [torch.zeros(each + 1) for each in range(size)]
    dist.all_gather(outputs, numbers(rank))
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [each.tolist() for each in outputs] == [numbers(each).ravel().tolist() for each in range(size)]
    assert [each.tolist() for each in uneven] == [[float(each)] * (each + 1) for each in range(size)]


@cell(function=["all_gather_into_tensor", "all_gather_single"])
def all_gather_into_one(dist: Any, rank: int, size: int, function: str) -> Any:
    """A concatenation, and what torch documents and gloo refuses: a stack, scalars, and the output's own part."""
    output, gather = torch.zeros(size * 2, 3), getattr(dist, function)
    returned = gather(output, numbers(rank))
    if dist is not torch.distributed:
        stack, scalars, own = torch.zeros(size, 2, 3), torch.zeros(size), torch.zeros(size, 4)
        own[rank] = rank + 1
        gather(stack, numbers(rank))
        gather(scalars, torch.tensor(rank + 0.25))
        gather(own, own[rank])
        assert stack.reshape(-1, 3).equal(output)
        assert scalars.tolist() == [each + 0.25 for each in range(size)]
        assert own.tolist() == [[each + 1.0] * 4 for each in range(size)]
    return returned, output


@cell()
def gather(dist: Any, rank: int, size: int) -> Any:
    """At every rank, by group rank, and at the default one."""
    results = []
    for dst in range(size):
        listed = zeros(size) if rank == dst else None
        results.append((dist.gather(numbers(rank), listed, dst=dst), listed))
    last, first = zeros(size) if rank == size - 1 else None, zeros(size) if rank == 0 else []
    dist.gather(numbers(rank), last, group_dst=size - 1)
    dist.gather(numbers(rank), first)
    return results, last, first


@cell(sides=OURS if hasattr(torch.distributed, "gather_single") else ("rankmesh",))
def gather_single(dist: Any, rank: int, size: int) -> Any:
    """A stack and a concatenation, at the last rank and at the default one."""
    stack, row = torch.zeros(size, 2, 3) if rank == size - 1 else None, torch.zeros(size * 6) if rank == 0 else None
    dist.gather_single(numbers(rank), stack, group_dst=size - 1)
    dist.gather_single(numbers(rank), row, async_op=True).wait()
    everyone = torch.stack([numbers(each) for each in range(size)])
    assert stack is None or stack.equal(everyone)
    assert row is None or row.equal(everyone.ravel())


@cell()
def scatter(dist: Any, rank: int, size: int) -> Any:
    results = []
    for src in range(size):
        listed = [numbers(10 * src + each) for each in range(size)] if rank == src else None
        results.append((dist.scatter(tensor := numbers(0), listed, src=src), tensor))
    from_last, from_first = zeros(2)
    dist.scatter(from_last, [numbers(each) for each in range(size)] if rank == size - 1 else None, group_src=size - 1)
    dist.scatter(from_first, [numbers(each) for each in range(size)] if rank == 0 else [])
    return results, from_last, from_first


@cell()
def all_to_all(dist: Any, rank: int, size: int) -> Any:
    """Also of uneven sizes, which gloo refuses."""
    outputs = zeros(size)
    returned = dist.all_to_all(outputs, [numbers(10 * rank + to) for to in range(size)])
    if dist is not torch.distributed:
        uneven = [torch.zeros(sender + 2 * rank) for sender in range(size)]
        dist.all_to_all(uneven, [torch.full((rank + 2 * to,), 10.0 * rank + to) for to in range(size)])
        wanted = [[10.0 * sender + rank] * (sender + 2 * rank) for sender in range(size)]
        assert [each.tolist() for each in uneven] == wanted
    return returned, outputs


@cell()
def all_to_all_single(dist: Any, rank: int, size: int) -> Any:
    """Without splits, with those of both sides (also none for a rank), and with those of one side."""
    sends = [(rank + to) % 3 for to in range(size)]
    expects = [(sender + rank) % 3 for sender in range(size)]
    rows = torch.arange(2.0 * sum(sends)).reshape(-1, 2) + 100 * rank
    plain, split, one = torch.zeros(2 * size), torch.zeros(sum(expects), 2), torch.zeros(2 * size)
    returned = dist.all_to_all_single(plain, torch.arange(2.0 * size) + 4 * rank)
    dist.all_to_all_single(split, rows, expects, sends)
    dist.all_to_all_single(one, torch.arange(2.0 * size) + rank, input_split_sizes=[2] * size)
    dist.all_to_all_single(one, one.clone(), output_split_sizes=[2] * size, input_split_sizes=[])
    return returned, plain, split, one


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
def barriers(dist: Any, rank: int, size: int) -> Any:
    results = [dist.barrier(), dist.barrier(async_op=True).wait(), dist.monitored_barrier()]
    results.append(dist.monitored_barrier(timeout=timedelta(seconds=20)))
    return [*results, dist.monitored_barrier(wait_all_ranks=True)]
