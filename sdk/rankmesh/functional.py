"""Functional collectives: they return their result, and leave their argument as it is.

They have the names of torch's ``torch.distributed._functional_collectives``. Immutable arrays need them: those of JAX,
read-only ones of NumPy, bytes::

    from rankmesh import functional

    total = functional.all_reduce(gradient)  # jax.Array in, jax.Array out

A result is of the argument's kind, dtype and device: a torch tensor for a torch tensor, a JAX array for a JAX array,
bytes for bytes; a NumPy array for any other object that exports a buffer. Autograd records nothing of them, and they
cannot be traced: inside ``jax.jit``, call them by ``jax.experimental.io_callback(..., ordered=True)``. The errors are
those of the functions of the same names in ``rankmesh``; and ValueError on ranks outside the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh._collectives import all_to_all as _all_to_all
from rankmesh._collectives import broadcast as _broadcast
from rankmesh._collectives import gather as _gather
from rankmesh._collectives import reduce as _reduce
from rankmesh._collectives.arguments import Timeout
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import require_member
from rankmesh._tensors.buffers import buffer_of, device_of
from rankmesh._tensors.torch_buffer import TorchBuffer
from rankmesh_agent.device import runtime
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

__all__ = ["all_gather_single", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_single"]


def all_reduce(
    tensor: Any, op: ReduceOp | PremulSum = ReduceOp.SUM, group: Group = None, *, timeout: Timeout = None
) -> Any:
    """Return the reduction of ``tensor`` over all ranks; see ``rankmesh.all_reduce``."""
    group, result = require_member(group), _copy(tensor)
    _reduce.all_reduce(result, op, group, timeout=timeout)
    return _like(tensor, result)


def broadcast(
    tensor: Any, src: int | None = None, group: Group = None, *, group_src: int | None = None, timeout: Timeout = None
) -> Any:
    """Return ``tensor`` of the source; elsewhere its shape and dtype alone matter. See ``rankmesh.broadcast``."""
    group, result = require_member(group), _copy(tensor)
    _broadcast.broadcast(result, src, group, group_src=group_src, timeout=timeout)
    return _like(tensor, result)


def all_gather_single(tensor: Any, group: Group = None, *, timeout: Timeout = None) -> Any:
    """Return the ranks' arrays, all of one shape, one behind the other along the first dimension.

    Of 0-d arrays the result has one element a rank. See ``rankmesh.all_gather_single``.
    """
    group, source = require_member(group), _elements(tensor)
    rows, *row = source.shape or (1,)
    result = _empty(source, (group.size() * rows, *row))
    _gather.all_gather_single(result, source, group, timeout=timeout)
    return _like(tensor, result)


def reduce_scatter_single(
    tensor: Any, op: ReduceOp | PremulSum = ReduceOp.SUM, group: Group = None, *, timeout: Timeout = None
) -> Any:
    """Return this rank's part of the reduction of ``tensor``, which is split along its first dimension.

    Raises:
        ValueError: the group's size does not divide the first dimension.

    See ``rankmesh.reduce_scatter_single``.
    """
    group, source = require_member(group), _elements(tensor)
    rows, *row = source.shape or (1,)
    if rows % group.size():
        raise ValueError(f"tensor has {rows} rows, which do not divide evenly by the group's {group.size()} ranks")
    result = _empty(source, (rows // group.size(), *row))
    _reduce.reduce_scatter_single(result, source, op, group, timeout=timeout)
    return _like(tensor, result)


def all_to_all_single(
    tensor: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    timeout: Timeout = None,
) -> Any:
    """Send every rank its part of ``tensor``, split along the first dimension; return the parts that come, in order.

    Args:
        tensor: the array.
        output_split_sizes: rows that come from each rank; None or empty for equal parts.
        input_split_sizes: rows of ``tensor`` for each rank; None or empty for equal parts.
        group: the group, the world by default.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    See ``rankmesh.all_to_all_single``.
    """
    group, source = require_member(group), _elements(tensor)
    rows, *row = source.shape or (1,)
    result = _empty(source, (sum(output_split_sizes) if output_split_sizes else rows, *row))
    _all_to_all.all_to_all_single(result, source, output_split_sizes, input_split_sizes, group, timeout=timeout)
    return _like(tensor, result)


def _elements(tensor: Any) -> Any:
    """Return an argument as an array of NumPy, CuPy or torch, in the same memory where that is possible."""
    buffer = buffer_of(tensor, "tensor")
    if isinstance(buffer, TorchBuffer):
        return tensor.detach()
    return buffer.host_array()[0] if device_of(tensor) is None else buffer.array()  # type: ignore[attr-defined]


def _empty(source: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of another shape, of the dtype and on the device of ``source``."""
    if isinstance(source, np.ndarray):
        return np.empty(shape, source.dtype)
    if hasattr(source, "new_empty"):  # torch's
        return source.new_empty(shape)
    with source.device:
        return runtime.cupy().empty(shape, source.dtype)


def _copy(tensor: Any) -> Any:
    source = _elements(tensor)
    if isinstance(source, np.ndarray):
        return source.copy()
    if hasattr(source, "clone"):  # torch's
        return source.clone()
    with source.device:
        return source.copy()


def _like(tensor: Any, result: Any) -> Any:
    """Return a result as an array of the argument's kind."""
    if isinstance(tensor, bytes):
        return result.tobytes()
    if isinstance(tensor, type(result)) or not hasattr(tensor, "__array_namespace__"):
        return result
    library = tensor.__array_namespace__()  # of the array API standard, as JAX has it
    if isinstance(result, np.ndarray):
        return library.asarray(result, device=tensor.device)
    return library.from_dlpack(result)
