"""The _multigpu functions of torch.distributed: collectives over a list of arrays per rank.

Each is one ordinary collective in host memory: a rank reduces its own arrays first, and copies the result to them.

Source: https://pytorch.org/docs/2.1/distributed.html#multi-gpu-collective-functions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rankmesh._collectives.arguments import Timeout, chain, check_list, communicator, group_rank_of, options
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import as_int
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh._tensors.layout import Array, WriteBack
from rankmesh_agent.collectives.reduction import combine_partials, combine_to_partial, partial_dtype, premultiplied
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

Tensors = Sequence[Any]
WriteBacks = list[WriteBack | None]


def broadcast_multigpu(
    tensor_list: Sequence[Any],
    src: int,
    group: Group = None,
    async_op: bool = False,
    src_tensor: int = 0,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy one array of one rank to all arrays of all ranks.

    Args:
        tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        src: global rank whose array is copied.
        src_tensor: index of the source's array in ``tensor_list``.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``src_tensor``.
        Exception: as for broadcast.
    """
    comm = communicator(group, "broadcast_multigpu")
    if comm is None:
        return None
    root = group_rank_of(comm, src, None, "src")
    arrays, write_backs = _outputs(tensor_list, "tensor_list")
    chosen = arrays[_index(src_tensor, "src_tensor", arrays)]
    finish = chain([_copy(chosen, arrays), *write_backs])
    return comm.broadcast(chosen, root, options(comm, timeout, async_op, list(tensor_list), finish))


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce all arrays of all ranks in place: each of them gets the result.

    Args:
        tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        op: as for all_reduce; AVG averages over all arrays.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the list is empty, or its arrays differ in size or dtype.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "all_reduce_multigpu")
    if comm is None:
        return None
    arrays, write_backs = _outputs(tensor_list, "tensor_list")
    total = _Total(op, arrays[0].dtype, comm.size * len(arrays))
    partial = total.partial(arrays)
    finish = chain([total.finish(partial, arrays[0]), _copy(arrays[0], arrays), *write_backs])
    given = options(comm, timeout, async_op, list(tensor_list), finish)
    return comm.all_reduce(partial, total.plain, given, _each(arrays))


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    dst_tensor: int = 0,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce all arrays of all ranks into one array of one rank; the others are unchanged.

    Args:
        tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        dst: global rank that gets the result.
        op: as for all_reduce; AVG averages over all arrays.
        dst_tensor: index of the destination's array in ``tensor_list``.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``dst_tensor``.
        Exception: as for reduce.
    """
    comm = communicator(group, "reduce_multigpu")
    if comm is None:
        return None
    root = group_rank_of(comm, dst, None, "dst")
    arrays, write_backs = _outputs(tensor_list, "tensor_list")
    chosen = _index(dst_tensor, "dst_tensor", arrays)
    total = _Total(op, arrays[0].dtype, comm.size * len(arrays))
    partial = total.partial(arrays)
    finish = chain([total.finish(partial, arrays[chosen]), write_backs[chosen]]) if comm.rank == root else None
    given = options(comm, timeout, async_op, list(tensor_list), finish)
    return comm.reduce(partial, total.plain, root, given, _each(arrays))


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy all arrays of all ranks into each of several lists on all ranks.

    Args:
        output_tensor_lists: lists of world size times ``len(input_tensor_list)`` arrays; array j of rank k is copied to
            ``[k * len(input_tensor_list) + j]`` of each.
        input_tensor_list: arrays with the same number of elements and dtype, as many on all ranks.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        Exception: as for all_gather.
    """
    comm = communicator(group, "all_gather_multigpu")
    if comm is None:
        return None
    inputs = _inputs(input_tensor_list, "input_tensor_list")
    _refuse_empty(output_tensor_lists, "output_tensor_lists")
    lists = [
        _outputs(outputs, f"output_tensor_lists[{number}]", inputs[0], comm.size * len(inputs))
        for number, outputs in enumerate(output_tensor_lists)
    ]
    parts = [np.empty(len(inputs) * inputs[0].size, inputs[0].dtype) for _ in range(comm.size)]

    def finish() -> None:
        pieces = [piece for part in parts for piece in np.split(part, len(inputs))]
        for outputs, write_backs in lists:
            for output, piece in zip(outputs, pieces, strict=True):
                output[:] = piece
            for write_back in filter(None, write_backs):
                write_back()

    users = [tensor for outputs in output_tensor_lists for tensor in outputs]
    return comm.all_gather(parts, np.concatenate(inputs), options(comm, timeout, async_op, users, finish))


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Any],
    input_tensor_lists: Sequence[Sequence[Any]],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays for each output of each rank over all lists of all ranks.

    Args:
        output_tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        input_tensor_lists: as many lists as outputs, of world size times ``len(output_tensor_list)`` arrays; output
            j of rank k gets the reduction of ``[k * len(output_tensor_list) + j]`` of all.
        op: as for all_reduce; AVG averages over all lists of all ranks.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        Exception: as for reduce_scatter.
    """
    comm = communicator(group, "reduce_scatter_multigpu")
    if comm is None:
        return None
    outputs, write_backs = _outputs(output_tensor_list, "output_tensor_list")
    count = len(outputs)
    _refuse_empty(input_tensor_lists, "input_tensor_lists")
    if len(input_tensor_lists) != count:
        raise ValueError(f"input_tensor_lists has {len(input_tensor_lists)} lists, but there are {count} outputs")
    lists = [
        _inputs(inputs, f"input_tensor_lists[{number}]", outputs[0], comm.size * count)
        for number, inputs in enumerate(input_tensor_lists)
    ]
    total = _Total(op, outputs[0].dtype, comm.size * count)
    partials = [total.partial([inputs[number] for inputs in lists]) for number in range(comm.size * count)]
    mine = [np.concatenate(partials[rank * count : (rank + 1) * count]) for rank in range(comm.size)]
    whole = np.empty_like(mine[0])
    pieces = np.split(whole, count)
    steps = [total.finish(piece, output) for piece, output in zip(pieces, outputs, strict=True)]
    given = options(comm, timeout, async_op, list(output_tensor_list), chain([*steps, *write_backs]))
    return comm.reduce_scatter(whole, mine, total.plain, given)


# Arguments


def _inputs(tensors: Tensors, name: str, like: Array | None = None, count: int | None = None) -> list[Array]:
    """Return the elements of arrays of one size and dtype: those of ``like``, or of the first array."""
    _refuse_empty(tensors, name)
    return _check([flat_in(tensor, f"{name}[{number}]") for number, tensor in enumerate(tensors)], name, like, count)


def _outputs(
    tensors: Tensors, name: str, like: Array | None = None, count: int | None = None
) -> tuple[list[Array], WriteBacks]:
    """Return memory for results of one size and dtype, and for each what copies it back."""
    _refuse_empty(tensors, name)
    found = [flat_out(tensor, f"{name}[{number}]") for number, tensor in enumerate(tensors)]
    return _check([array for array, _ in found], name, like, count), [write_back for _, write_back in found]


def _refuse_empty(tensors: Tensors, name: str) -> None:
    if not check_list(tensors, name):
        raise ValueError(f"{name} is empty: give at least one array")


def _check(arrays: list[Array], name: str, like: Array | None, count: int | None) -> list[Array]:
    like = arrays[0] if like is None else like
    if count is not None and len(arrays) != count:
        raise ValueError(f"{name} has {len(arrays)} arrays, but must have {count}")
    for number, array in enumerate(arrays):
        if array.size != like.size or array.dtype != like.dtype:
            raise ValueError(
                f"{name}[{number}] is {display(array.dtype)}[{array.size}], but must be "
                f"{display(like.dtype)}[{like.size}]: all arrays must have the same dtype and number of elements"
            )
    return arrays


def _index(number: int, name: str, arrays: Sequence[Any]) -> int:
    if not 0 <= as_int(number, name) < len(arrays):
        raise ValueError(f"{name}={number} is not in the list, which has {len(arrays)} arrays")
    return number


def _each(arrays: Sequence[Array]) -> str:
    """Return the part of a call's description in which the ranks' lists must agree."""
    return f"{len(arrays)} arrays a rank"


# Steps


class _Total:
    """A reduction of the arrays of all ranks, by way of a partial result at each rank."""

    def __init__(self, op: ReduceOp | PremulSum, dtype: np.dtype[Any], members: int) -> None:
        self._op, self._factor = reduction(op, dtype)
        self._dtype = partial_dtype(self._op, dtype, members)
        self._members = members
        self.plain = ReduceOp.SUM if self._op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else self._op

    def partial(self, arrays: Sequence[Array]) -> Array:
        """Return the reduction of this rank's arrays, not rounded yet."""
        if self._factor is not None:
            arrays = [premultiplied(self._factor, array) for array in arrays]
        out = np.empty(arrays[0].size, self._dtype)
        with np.errstate(all="ignore"):
            combine_to_partial(self._op, arrays, out)
        return out

    def finish(self, partial: Array, out: Array) -> Callable[[], None]:
        """Return a function that rounds, and divides, the reduced partial results into ``out``."""

        def run() -> None:
            with np.errstate(all="ignore"):
                combine_partials(self._op, [partial], self._members, out)

        return run


def _copy(array: Array, outputs: Sequence[Array]) -> Callable[[], None]:
    def run() -> None:
        for output in outputs:
            if output is not array:
                output[:] = array

    return run
