"""Sums of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from support.sides import Cells

cell = Cells(in_groups=True)

OVER = ("over",)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "plain": lambda rank: coo([[rank, 3], [0, rank]], [1.0 + rank, 2.0], 4, 4),
    "of several at one place": lambda rank: coo([[0, 0, rank, 0], [1, 1, 2, 1]], [1.0, 2.0, 3.0, rank], 4, 4),
    "hybrid": lambda rank: coo([[rank, 2]], torch.arange(6.0).reshape(2, 3) + rank, 4, 3),
    "empty at a rank": lambda rank: coo([[0, 1][:rank]], [5.0, 6.0][:rank], 4),
    "empty": lambda rank: coo(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), 4, 4),
    "of whole numbers": lambda rank: coo([[rank, 0]], [1, 2 + rank], 4),
    "of doubles": lambda rank: coo([[rank, 0]], torch.tensor([0.5, 2.0 + rank]).double(), 4),
}
"""Sparse tensors that differ between the ranks in where they have elements, and how many."""


def coo(indices: Any, values: Any, *shape: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape)


def told(tensor: torch.Tensor) -> Any:
    """Return what is in a sparse tensor."""
    done = tensor.coalesce()
    return done.indices(), done.values(), tuple(tensor.shape), done.sparse_dim()


@cell(kind=KINDS)
def summed(group: Any, rank: int, size: int, kind: str) -> Any:
    tensor = KINDS[kind](rank)
    return c10d.all_reduce(tensor, group=group), told(tensor)


@cell(kind=["plain", "hybrid"])
def summed_asynchronously(group: Any, rank: int, size: int, kind: str) -> Any:
    tensor = KINDS[kind](rank)
    work = c10d.all_reduce(tensor, group=group, async_op=True)
    return work.wait(), told(tensor), work.is_completed()


@cell(sides=OVER, dtype=["bfloat16", "bool"])
def of_other_dtypes(group: Any, rank: int, size: int, dtype: str) -> Any:
    kind = getattr(torch, dtype)
    tensor = coo([[rank, 3]], torch.ones(2).to(kind), 4)
    c10d.all_reduce(tensor, group=group)
    wanted = torch.zeros(4)
    wanted[:size] = 1
    wanted[3] = 1 if kind is torch.bool else size
    assert tensor.dtype is kind
    assert tensor.to_dense().tolist() == wanted.to(kind).tolist()


@cell(sides=OVER)
def with_a_gradient(group: Any, rank: int, size: int) -> Any:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([rank, rank, 4])).sum().backward()
    c10d.all_reduce(table.weight.grad, group=group)
    wanted = [2.0 * (each < size) + size * (each == 4) for each in range(5)]
    assert table.weight.grad.to_dense().tolist() == [[number] * 2 for number in wanted]
    leaf = torch.sparse_coo_tensor([[0]], [1.0], (2,), requires_grad=True)
    c10d.all_reduce(leaf, group=group)
    assert leaf.to_dense().tolist() == [size, 0]


def usable(group: Any, size: int) -> None:
    c10d.all_reduce(tensor := torch.ones(2), group=group)
    assert tensor.tolist() == [size] * 2


DIFFERENT = {
    "shapes": lambda rank: coo([[0]], [1.0], 4 + rank),
    "numbers of dimensions": lambda rank: torch.ones((2,) * (rank + 1)).to_sparse(),
    "sparse dimensions": lambda rank: torch.ones(2, 2).to_sparse(1 + rank % 2),
    "dtypes": lambda rank: torch.ones(2, dtype=[torch.float32, torch.float64][rank % 2]).to_sparse(),
    "layouts": lambda rank: torch.ones(2) if rank == 1 else torch.ones(2).to_sparse(),
}


@cell(sides=OVER, sizes=(2, 3), what=DIFFERENT)
def ranks_whose_tensors_differ(group: Any, rank: int, size: int, what: str) -> Any:
    """All are told, and nobody's tensor changes."""
    tensor = DIFFERENT[what](rank)
    before = tensor.to_dense().tolist()
    with pytest.raises((ValueError, RuntimeError), match=r"differ|the same call"):
        c10d.all_reduce(tensor, group=group)
    assert tensor.to_dense().tolist() == before
    usable(group, size)


@cell(sides=OVER)
def what_cannot_be_summed(group: Any, rank: int, size: int) -> Any:
    for tensor, op, reported in (
        (torch.ones(2).to_sparse(), c10d.ReduceOp.MAX, "summed only"),
        (torch.eye(2).to_sparse_csr(), c10d.ReduceOp.SUM, "to_sparse_coo"),
    ):
        with pytest.raises(ValueError, match=reported):
            c10d.all_reduce(tensor, op, group)
    usable(group, size)
