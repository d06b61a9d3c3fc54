"""Sum of sparse tensors, as in torch's gloo; DDP needs it for the sparse gradients of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rankmesh._collectives.arguments import Timeout
from rankmesh._collectives.gather import all_gather
from rankmesh._collectives.reduce import all_reduce
from rankmesh._session.process_group import ProcessGroup
from rankmesh_agent.wire.ops import ReduceOp


def all_reduce_sparse(tensor: Any, op: Any, group: ProcessGroup, timeout: Timeout) -> None:
    """Sum a sparse tensor over all ranks, in place; the result is coalesced, and the same on every rank.

    The ranks exchange their numbers of elements, then gather indices and values: n ranks with k elements of d
    dense values each move n * k * (d values + indices) to each.

    Args:
        tensor: COO tensor, of the same shape, dtype and numbers of sparse and dense dimensions on all ranks.
    """
    if op is not ReduceOp.SUM:
        raise ValueError(f"sparse tensors can be summed only, not reduced by {op!r}; pass tensor.to_dense()")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce of layout {tensor.layout} is not supported; pass tensor.to_sparse_coo()")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    _same_shape(mine, group, timeout)
    counts = np.zeros(group.size(), np.int64)
    counts[group.rank()] = values.shape[0]
    all_reduce(counts, group=group, timeout=timeout)
    all_indices = [indices.new_empty((indices.shape[0], count)) for count in counts.tolist()]
    all_values = [values.new_empty((count, *values.shape[1:])) for count in counts.tolist()]
    all_gather(all_indices, indices, group, timeout=timeout)
    all_gather(all_values, values, group, timeout=timeout)
    merged = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), mine.shape, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(merged.coalesce())


def _same_shape(tensor: Any, group: ProcessGroup, timeout: Timeout) -> None:
    """Raise at all ranks unless all tensors have one shape, which the gathered sizes do not show."""
    shape = [tensor.sparse_dim(), *tensor.shape]
    mine = np.zeros(64, np.int64)
    mine[: len(shape)] = shape
    most, least = mine.copy(), -mine
    all_reduce(most, ReduceOp.MAX, group, timeout=timeout)
    all_reduce(least, ReduceOp.MAX, group, timeout=timeout)
    if not np.array_equal(most, -least):
        raise ValueError(
            f"sparse all_reduce: the ranks' tensors differ in shape or in sparse dimensions; this rank's has shape "
            f"{tuple(tensor.shape)} and {shape[0]} sparse dimensions"
        )
