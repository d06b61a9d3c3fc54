"""Kinds of tensors: views, scalars, empty ones, and those that autograd follows; test_containers_torch.py has more."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.sides import Cells

cell = Cells()
VIEWS = {
    "transposed": lambda square: square.t(),
    "a column": lambda square: square[:, 1],
    "channels last": lambda square: square.reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
}
"""Tensors whose elements do not lie in order in memory."""


@cell(kind=["transposed", "channels last"])
def collectives_of_views(dist: Any, rank: int, size: int, kind: str) -> Any:
    """gloo takes views of all elements alone: of others, the elements from the first on in memory."""
    view = VIEWS[kind](torch.arange(16.0).reshape(4, 4) + rank)
    gathered = [torch.zeros(view.shape) for _ in range(size)]
    into = [VIEWS[kind](torch.zeros(4, 4)) for _ in range(size)]
    dist.all_gather(gathered, view)
    dist.all_gather(into, torch.full(view.shape, float(rank)))
    dist.all_reduce(view)
    reduced = view.clone()
    dist.broadcast(view, size - 1)
    return gathered, into, reduced, view, view.stride()


@cell(kind=VIEWS, sizes=(2, 3), sides=("rankmesh", "over"))
def messages_of_views(dist: Any, rank: int, size: int, kind: str) -> Any:
    """gloo refuses them."""
    square, before = torch.arange(16.0).reshape(4, 4), (rank - 1) % size
    got, around = torch.zeros(VIEWS[kind](square).shape), torch.zeros(4, 4)
    into = VIEWS[kind](around)
    for sent, received in ((VIEWS[kind](square + rank), got), (torch.full(into.shape, rank + 1.0), into)):
        work = dist.irecv(received, before)
        dist.isend(sent, (rank + 1) % size).wait()
        work.wait()
    assert got.equal(VIEWS[kind](square + before))
    assert into.eq(before + 1.0).all()
    assert kind == "channels last" or around.sum() == into.sum(), "the elements between stay as they were"


@cell()
def scalars(dist: Any, rank: int, size: int) -> Any:
    total, root, mine = torch.tensor(rank + 1.0), torch.tensor(rank), torch.tensor(0.0)
    dist.all_reduce(total)
    dist.broadcast(root, size - 1)
    tensor_list = [torch.tensor(0.0) for _ in range(size)]
    dist.all_gather(tensor_list, torch.tensor(rank + 0.5))
    dist.scatter(mine, [torch.tensor(each + 0.5) for each in range(size)] if rank == 0 else None)
    listed = [torch.tensor(0.0) for _ in range(size)] if rank == 0 else None
    dist.gather(mine * 2, listed)
    return total, root, tensor_list, mine, listed


@cell(collective=["all_reduce", "broadcast", "all_gather", "all_to_all_single", "reduce_scatter", "gather", "scatter"])
def empty_tensors(dist: Any, rank: int, size: int, collective: str) -> Any:
    tensor, tensors = torch.zeros(0, 3), [torch.zeros(0, 3) for _ in range(size)]
    arguments = {
        "all_reduce": (tensor,),
        "broadcast": (tensor, 0),
        "all_gather": (tensors, tensor),
        "all_to_all_single": (tensor, torch.zeros(0, 3)),
        "reduce_scatter": (tensor, tensors),
        "gather": (tensor, tensors if rank == 0 else None),
        "scatter": (tensor, tensors if rank == 0 else None),
    }[collective]
    return getattr(dist, collective)(*arguments), tensor, tensors


@cell()
def parameters(dist: Any, rank: int, size: int) -> Any:
    """Leaves that require a gradient: the collectives work on the data."""
    weight = torch.nn.Parameter(torch.full((2, 2), float(rank)))
    dist.broadcast(weight.data, 0)
    dist.all_reduce(weight.detach())
    (weight * weight).sum().backward()
    dist.all_reduce(weight.grad)
    return weight, weight.requires_grad, weight.grad


@cell(no_grad=[False, True])
def a_leaf_that_requires_a_gradient(dist: Any, rank: int, size: int, no_grad: bool) -> Any:
    weight = torch.full((2,), float(rank + 1), requires_grad=True)
    with torch.set_grad_enabled(not no_grad):
        dist.all_reduce(weight)
        dist.broadcast(weight, 0)
    return weight, weight.requires_grad, weight.is_leaf


@cell()
def buffers_of_a_module(dist: Any, rank: int, size: int) -> Any:
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for name, tensor in module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor += rank
        dist.broadcast(tensor, size - 1)
    return list(module.state_dict().items())


@cell()
def memory_of_others(dist: Any, rank: int, size: int) -> Any:
    """NumPy's memory, and memory shared between processes."""
    array, shared = np.arange(4.0) + rank, (torch.arange(4) + rank).share_memory_()
    dist.all_reduce(torch.from_numpy(array))
    dist.all_reduce(shared)
    return array.tolist(), shared
