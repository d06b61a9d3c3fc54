"""The functions of torch's page that take one array a device: lists of arrays, of one host's memory too.

Where each array is on a GPU of its own, NCCL carries the calls out. Else one collective brings every rank's arrays to
where they are needed, and they are reduced there in the order of ranks and lists: simple and exact, for programs that
use these functions still. Source of all:
https://pytorch.org/docs/2.1/distributed.html#multi-gpu-collective-functions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh._collectives.arguments import Timeout, all_of, first, group_root, listed, members_of, options, whole
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.session import Group
from rankmesh._tensors.arrays import destination, source
from rankmesh._tensors.containers import Array, device_of
from rankmesh_agent.collectives.reduction import combine, premultiplied
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

if TYPE_CHECKING:
    from rankmesh_agent.gpu.communicator import GpuCommunicator


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
        group: the group, the world by default.
        async_op: return at once; the arrays must not be touched before the Work's ``wait()`` returns.
        src_tensor: which of the source's arrays, its index in ``tensor_list``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``src_tensor``.
        As broadcast.
    """
    comm = members_of(group, "broadcast_multigpu")
    if comm is None:
        return None
    root = group_root(comm, src, None, "src")
    gpus = _gpus(group, tensor_list)
    if gpus is not None:
        index = _index(src_tensor, "src_tensor", tensor_list)
        from rankmesh._collectives import over_gpus

        return over_gpus.broadcast(gpus, tensor_list, root, index, options(gpus, timeout, async_op, list(tensor_list)))
    arrays, after = _destinations(tensor_list, "tensor_list")
    chosen = arrays[_index(src_tensor, "src_tensor", arrays)]
    how = options(comm, timeout, async_op, list(tensor_list), all_of([_copy(chosen, arrays), after]))
    return comm.broadcast(chosen, root, how)


def all_reduce_multigpu(
    tensor_list: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce all arrays of all ranks; each of them gets the result.

    Args:
        tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        op: as for all_reduce; AVG averages over all arrays.
        group: the group, the world by default.
        async_op: return at once; the arrays must not be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the list is empty, or its arrays differ in size or dtype.
        As all_reduce.
    """
    comm = members_of(group, "all_reduce_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, tensor_list, op)
    if gpus is not None:
        from rankmesh._collectives import over_gpus

        return over_gpus.all_reduce(gpus, tensor_list, op, options(gpus, timeout, async_op, list(tensor_list)))
    arrays, after = _destinations(tensor_list, "tensor_list")
    mine, how = _together(arrays, op)
    parts = [np.empty_like(mine) for _ in range(comm.size)]
    finish = _reduce(how, parts, len(arrays), arrays)
    return comm.all_gather(parts, mine, options(comm, timeout, async_op, list(tensor_list), all_of([finish, after])))


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
    """Reduce all arrays of all ranks into one array of one rank; the others stay as they are.

    Args:
        tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        dst: global rank that gets the result.
        op: as for all_reduce; AVG averages over all arrays.
        group: the group, the world by default.
        async_op: return at once; the arrays must not be touched before the Work's ``wait()`` returns.
        dst_tensor: which of the destination's arrays, its index in ``tensor_list``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``dst_tensor``.
        As reduce.
    """
    comm = members_of(group, "reduce_multigpu")
    if comm is None:
        return None
    root = group_root(comm, dst, None, "dst")
    gpus = _gpus(group, tensor_list, op)
    if gpus is not None:
        index, users = _index(dst_tensor, "dst_tensor", tensor_list), list(tensor_list)
        from rankmesh._collectives import over_gpus

        return over_gpus.reduce(gpus, tensor_list, root, index, op, options(gpus, timeout, async_op, users))
    arrays, after = _destinations(tensor_list, "tensor_list")
    chosen = arrays[_index(dst_tensor, "dst_tensor", arrays)]
    mine, how = _together(arrays, op)
    parts = [np.empty_like(mine) for _ in range(comm.size)] if comm.rank == root else []
    finish = all_of([_reduce(how, parts, len(arrays), [chosen]), after]) if comm.rank == root else None
    return comm.gather(parts, mine, root, options(comm, timeout, async_op, list(tensor_list), finish))


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
        output_tensor_lists: lists of world size times ``len(input_tensor_list)`` arrays; array j of rank k comes to
            ``[k * len(input_tensor_list) + j]`` of each.
        input_tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        As all_gather.
    """
    comm = members_of(group, "all_gather_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, input_tensor_list)
    if gpus is not None:
        users = [tensor for outputs in output_tensor_lists for tensor in outputs]
        from rankmesh._collectives import over_gpus

        return over_gpus.all_gather(
            gpus, output_tensor_lists, input_tensor_list, options(gpus, timeout, async_op, users)
        )
    inputs = _sources(input_tensor_list, "input_tensor_list")
    mine = np.concatenate(inputs)
    _refuse_empty(output_tensor_lists, "output_tensor_lists")
    lists = [
        _destinations(outputs, f"output_tensor_lists[{number}]", inputs[0], comm.size * len(inputs))
        for number, outputs in enumerate(output_tensor_lists)
    ]
    parts = [np.empty_like(mine) for _ in range(comm.size)]

    def finish() -> None:
        everyone = [piece for part in parts for piece in np.split(part, len(inputs))]
        for outputs, _ in lists:
            for output, piece in zip(outputs, everyone, strict=True):
                output[:] = piece

    users = [tensor for outputs in output_tensor_lists for tensor in outputs]
    how = options(comm, timeout, async_op, users, all_of([finish, *(after for _, after in lists)]))
    return comm.all_gather(parts, mine, how)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[Any],
    input_tensor_lists: Sequence[Sequence[Any]],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays that all lists of all ranks have for each output of each rank.

    Args:
        output_tensor_list: arrays with the same number of elements and dtype, as many on all ranks.
        input_tensor_lists: as many lists as outputs, of world size times ``len(output_tensor_list)`` arrays; output
            j of rank k gets the reduction of ``[k * len(output_tensor_list) + j]`` of all.
        op: as for all_reduce; AVG averages over all lists of all ranks.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        As reduce_scatter.
    """
    comm = members_of(group, "reduce_scatter_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, output_tensor_list, op)
    if gpus is not None:
        users = list(output_tensor_list)
        from rankmesh._collectives import over_gpus

        return over_gpus.reduce_scatter(
            gpus, output_tensor_list, input_tensor_lists, op, options(gpus, timeout, async_op, users)
        )
    outputs, after = _destinations(output_tensor_list, "output_tensor_list")
    count = len(outputs)
    _refuse_empty(input_tensor_lists, "input_tensor_lists")
    if len(input_tensor_lists) != count:
        raise ValueError(f"input_tensor_lists has {len(input_tensor_lists)} lists, but there are {count} outputs")
    lists = [
        _sources(inputs, f"input_tensor_lists[{number}]", outputs[0], comm.size * count)
        for number, inputs in enumerate(input_tensor_lists)
    ]
    # For each rank: its outputs' arrays of the first list, then of the second, …
    pairs = [
        _together([part for inputs in lists for part in inputs[rank * count : (rank + 1) * count]], op)
        for rank in range(comm.size)
    ]
    how = pairs[0][1]
    parts = [np.empty_like(pairs[0][0]) for _ in range(comm.size)]

    def finish() -> None:
        pieces = [piece for part in parts for piece in np.split(part, count * count)]
        for number, output in enumerate(outputs):
            combine(how, pieces[number::count], output)

    users = list(output_tensor_list)
    return comm.all_to_all(
        parts, [mine for mine, _ in pairs], options(comm, timeout, async_op, users, all_of([finish, after]))
    )


def _gpus(group: Group, tensors: Sequence[Any], op: ReduceOp | PremulSum | None = None) -> GpuCommunicator | None:
    """Return who makes the call where each array is on a GPU of its own; None where they go through host memory."""
    if device_of(first(tensors)) is None:
        return None
    from rankmesh._collectives.over_gpus import members_over

    return members_over(group, tensors, op)


def _destinations(
    tensors: Sequence[Any], name: str, like: Array | None = None, count: int | None = None
) -> tuple[list[Array], Callable[[], None] | None]:
    """Return memory for arrays of one size and dtype that are written to, and what copies it back."""
    _refuse_empty(tensors, name)
    found = [destination(tensor, f"{name}[{number}]") for number, tensor in enumerate(tensors)]
    arrays = [array for array, _ in found]
    _check(arrays, name, like, count)
    return arrays, all_of([after for _, after in found])


def _sources(tensors: Sequence[Any], name: str, like: Array | None = None, count: int | None = None) -> list[Array]:
    _refuse_empty(tensors, name)
    arrays = [source(tensor, f"{name}[{number}]") for number, tensor in enumerate(tensors)]
    _check(arrays, name, like, count)
    return arrays


def _refuse_empty(tensors: Sequence[Any], name: str) -> None:
    if not listed(tensors, name):
        raise ValueError(f"{name} is empty: give at least one array")


def _check(arrays: Sequence[Array], name: str, like: Array | None, count: int | None) -> None:
    """Refuse arrays that are not like another, or like the first of them, or not as many as they must be."""
    like = arrays[0] if like is None else like
    if count is not None and len(arrays) != count:
        raise ValueError(f"{name} has {len(arrays)} arrays, but must have {count}")
    for number, array in enumerate(arrays):
        if array.size != like.size or array.dtype != like.dtype:
            raise ValueError(
                f"{name}[{number}] is {display(array.dtype)}[{array.size}], but must be "
                f"{display(like.dtype)}[{like.size}]: all arrays must have the same dtype and number of elements"
            )


def _index(number: int, name: str, arrays: Sequence[Any]) -> int:
    if not 0 <= whole(number, name) < len(arrays):
        raise ValueError(f"{name}={number} is not in the list, which has {len(arrays)} arrays")
    return number


def _together(arrays: Sequence[Array], op: ReduceOp | PremulSum) -> tuple[Array, ReduceOp]:
    """Return the arrays behind one another, multiplied if the operation says so, and how they are to be reduced."""
    how, factor = reduction(op, arrays[0].dtype)
    mine = np.concatenate(arrays)
    return (mine if factor is None else premultiplied(factor, mine)), how


def _reduce(how: ReduceOp, parts: Sequence[Array], count: int, outputs: Sequence[Array]) -> Callable[[], None]:
    """Return what reduces ``count`` arrays of each rank and copies the result to the outputs."""

    def finish() -> None:
        combine(how, [piece for part in parts for piece in np.split(part, count)], outputs[0])
        _copy(outputs[0], outputs)()

    return finish


def _copy(array: Array, outputs: Sequence[Array]) -> Callable[[], None]:
    def run() -> None:
        for output in outputs:
            if output is not array:
                output[:] = array

    return run
