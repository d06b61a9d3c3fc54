"""Every kind of tensor: views, empty ones, numbers, and those that autograd follows."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()


def sources(rank: int) -> dict[str, torch.Tensor]:
    """Return tensors whose elements do not lie in order in memory."""
    square = torch.arange(16.0).reshape(4, 4) + rank
    return {
        "transposed": square.t(),
        "every other": square[:, ::2],
        "a column": square[:, 1],
        "a slice": square[1:3, 1:3],
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1) + rank,
        "channels last": (torch.arange(24.0).reshape(1, 2, 3, 4) + rank).to(memory_format=torch.channels_last),
    }


KINDS = list(sources(0))


def base_of(kind: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return such a tensor, and the whole memory it lies in, to see what else was written to."""
    view = sources(rank)[kind]
    count = view.untyped_storage().nbytes() // view.element_size()
    return view, torch.as_strided(view, (count,), (1,), 0)


@cell(kind=KINDS)
def all_reduce(dist: Any, rank: int, size: int, kind: str) -> Any:
    view, base = base_of(kind, rank)
    dist.all_reduce(view)
    return view, base, view.stride()


@cell(kind=KINDS)
def broadcast(dist: Any, rank: int, size: int, kind: str) -> Any:
    view, base = base_of(kind, rank)
    dist.broadcast(view, size - 1)
    return view, base


@cell(kind=KINDS)
def all_gather(dist: Any, rank: int, size: int, kind: str) -> Any:
    view, _ = base_of(kind, rank)
    tensor_list = [torch.zeros(view.shape) for _ in range(size)]
    dist.all_gather(tensor_list, view)
    return tensor_list


@cell(kind=KINDS)
def all_gather_into_such(dist: Any, rank: int, size: int, kind: str) -> Any:
    outputs = [base_of(kind, rank + each)[0] for each in range(size)]
    dist.all_gather(outputs, torch.full(outputs[0].shape, float(rank)))
    return outputs


@cell(kind=KINDS, sizes=(2, 3))
def isend(dist: Any, rank: int, size: int, kind: str) -> Any:
    view, _ = base_of(kind, rank)
    got = torch.zeros(view.shape)
    work = dist.isend(view, (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    return work.wait(), got


@cell(kind=KINDS, sizes=(2, 3))
def irecv_into_such(dist: Any, rank: int, size: int, kind: str) -> Any:
    view, base = base_of(kind, rank)
    work = dist.irecv(view, (rank - 1) % size)
    dist.send(torch.full(view.shape, -1.0 * rank), (rank + 1) % size)
    return work.wait(), view, base


@cell()
def numbers(dist: Any, rank: int, size: int) -> Any:
    """Tensors of no dimension."""
    total, root = torch.tensor(rank + 1.0), torch.tensor(rank)
    dist.all_reduce(total)
    dist.broadcast(root, size - 1)
    tensor_list = [torch.tensor(0.0) for _ in range(size)]
    dist.all_gather(tensor_list, torch.tensor(rank + 0.5))
    return total, root, tensor_list


@cell()
def all_gather_of_numbers_into_one(dist: Any, rank: int, size: int) -> Any:
    output = torch.zeros(size)
    dist.all_gather_into_tensor(output, torch.tensor(rank + 0.25))
    return output


@cell()
def scatter_and_gather_of_numbers(dist: Any, rank: int, size: int) -> Any:
    mine = torch.tensor(0.0)
    dist.scatter(mine, [torch.tensor(each + 0.5) for each in range(size)] if rank == 0 else None)
    listed = [torch.tensor(0.0) for _ in range(size)] if rank == 0 else None
    dist.gather(mine * 2, listed)
    return mine, listed


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


@cell()
def a_leaf_that_requires_a_gradient(dist: Any, rank: int, size: int) -> Any:
    weight = torch.full((2,), float(rank + 1), requires_grad=True)
    dist.all_reduce(weight)
    return weight, weight.requires_grad, weight.is_leaf


@cell()
def a_leaf_under_no_grad(dist: Any, rank: int, size: int) -> Any:
    weight = torch.full((2,), float(rank + 1), requires_grad=True)
    with torch.no_grad():
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
    return [(name, tensor) for name, tensor in module.state_dict().items()]


@cell()
def conjugated_views(dist: Any, rank: int, size: int) -> Any:
    tensor = (torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1)).conj()
    dist.all_reduce(tensor)
    return tensor.resolve_conj()


@cell()
def negated_views(dist: Any, rank: int, size: int) -> Any:
    tensor = (torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1)).conj().imag
    dist.all_reduce(tensor)
    return tensor.resolve_neg()


@cell()
def tensors_over_numpys_memory(dist: Any, rank: int, size: int) -> Any:
    import numpy as np

    array = np.arange(4.0) + rank
    dist.all_reduce(torch.from_numpy(array))
    return array.tolist()


@cell()
def tensors_in_shared_memory(dist: Any, rank: int, size: int) -> Any:
    tensor = (torch.arange(4) + rank).share_memory_()
    dist.all_reduce(tensor)
    return tensor
