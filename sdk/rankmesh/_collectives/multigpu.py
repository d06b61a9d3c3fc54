"""The _multigpu functions of torch.distributed: collectives over a list of arrays per rank.

If each array is on a GPU of its own, NCCL treats each GPU as a rank. Otherwise one ordinary collective in host memory
moves the arrays of each rank together, and they are reduced in the order of ranks and lists, exactly.

Source: https://pytorch.org/docs/2.1/distributed.html#multi-gpu-collective-functions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh._collectives.arguments import (
    Timeout,
    chain,
    check_list,
    communicator,
    first_of,
    group_rank_of,
    options,
)
from rankmesh._collectives.reduce import premultiply
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import as_int
from rankmesh._tensors.buffers import buffer_of, device_of, flat_in, flat_out
from rankmesh._tensors.layout import Array, WriteBack
from rankmesh_agent.collectives.reduction import combine, premultiplied
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import OpType, PremulSum, ReduceOp

if TYPE_CHECKING:
    from rankmesh_agent.gpu.communicator import GpuCommunicator

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
        group: the group, the world by default.
        async_op: return immediately; the arrays must not be used before the Work's ``wait()`` returns.
        src_tensor: index of the source's array in ``tensor_list``.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``src_tensor``.
        Exception: as for broadcast.
    """
    comm = communicator(group, "broadcast_multigpu")
    if comm is None:
        return None
    root = group_rank_of(comm, src, None, "src")
    gpus = _gpus(group, tensor_list)
    arrays, write_backs = _outputs(gpus or comm, tensor_list, "tensor_list")
    chosen = arrays[_index(src_tensor, "src_tensor", arrays)]
    users = list(tensor_list)
    if gpus is not None:
        key = OpType.BROADCAST, chosen.dtype, chosen.size, None, comm.global_ranks[root]
        each = [(array, root * len(arrays) + src_tensor) for array in arrays]
        return gpus.submit_multigpu(key, each, write_backs, options(gpus, timeout, async_op, users))
    finish = chain([_copy(chosen, arrays), *write_backs])
    return comm.broadcast(chosen, root, options(comm, timeout, async_op, users, finish))


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
        group: the group, the world by default.
        async_op: return immediately; the arrays must not be used before the Work's ``wait()`` returns.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: the list is empty, or its arrays differ in size or dtype.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "all_reduce_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, tensor_list, op)
    arrays, write_backs = _outputs(gpus or comm, tensor_list, "tensor_list")
    arrays, write_backs, reduce_op = _premultiplied(arrays, write_backs, op)
    users = list(tensor_list)
    if gpus is not None:
        key = OpType.ALL_REDUCE, arrays[0].dtype, arrays[0].size, reduce_op
        each = [(array, reduce_op) for array in arrays]
        return gpus.submit_multigpu(key, each, write_backs, options(gpus, timeout, async_op, users))
    parts = _parts(comm, arrays)
    finish = chain([_reduce(reduce_op, parts, len(arrays), arrays), *write_backs])
    return comm.all_gather(parts, np.concatenate(arrays), options(comm, timeout, async_op, users, finish))


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
        group: the group, the world by default.
        async_op: return immediately; the arrays must not be used before the Work's ``wait()`` returns.
        dst_tensor: index of the destination's array in ``tensor_list``.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: the list is empty, its arrays differ in size or dtype, or there is no ``dst_tensor``.
        Exception: as for reduce.
    """
    comm = communicator(group, "reduce_multigpu")
    if comm is None:
        return None
    root = group_rank_of(comm, dst, None, "dst")
    gpus = _gpus(group, tensor_list, op)
    arrays, write_backs = _outputs(gpus or comm, tensor_list, "tensor_list")
    _index(dst_tensor, "dst_tensor", arrays)
    arrays, write_backs, reduce_op = _premultiplied(arrays, write_backs, op)
    receives, users = comm.rank == root, list(tensor_list)
    write_back = write_backs[dst_tensor] if receives else None
    if gpus is not None:
        key = OpType.REDUCE, arrays[0].dtype, arrays[0].size, reduce_op, comm.global_ranks[root]
        each = [(array, reduce_op, root * len(arrays) + dst_tensor) for array in arrays]
        write_backs = [write_back if number == dst_tensor else None for number in range(len(arrays))]
        return gpus.submit_multigpu(key, each, write_backs, options(gpus, timeout, async_op, users))
    parts = _parts(comm, arrays) if receives else []
    finish = chain([_reduce(reduce_op, parts, len(arrays), [arrays[dst_tensor]]), write_back]) if receives else None
    return comm.gather(parts, np.concatenate(arrays), root, options(comm, timeout, async_op, users, finish))


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
        group: the group, the world by default.
        async_op: return immediately; no array may be used before the Work's ``wait()`` returns.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        Exception: as for all_gather.
    """
    comm = communicator(group, "all_gather_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, input_tensor_list)
    inputs = _inputs(gpus or comm, input_tensor_list, "input_tensor_list")
    _refuse_empty(output_tensor_lists, "output_tensor_lists")
    lists = [
        _outputs(gpus or comm, outputs, f"output_tensor_lists[{number}]", inputs[0], comm.size * len(inputs))
        for number, outputs in enumerate(output_tensor_lists)
    ]
    users = [tensor for outputs in output_tensor_lists for tensor in outputs]
    if gpus is not None:
        key = OpType.ALL_GATHER, inputs[0].dtype, inputs[0].size
        each = [(outputs, array) for (outputs, _), array in zip(lists, inputs, strict=True)]
        finishes = [chain(write_backs) for _, write_backs in lists]
        return gpus.submit_multigpu(key, each, finishes, options(gpus, timeout, async_op, users))
    parts = _parts(comm, inputs)

    def finish() -> None:
        pieces = _pieces(parts, len(inputs))
        for outputs, _ in lists:
            for output, piece in zip(outputs, pieces, strict=True):
                output[:] = piece

    finish_all = chain([finish, *(write_back for _, write_backs in lists for write_back in write_backs)])
    return comm.all_gather(parts, np.concatenate(inputs), options(comm, timeout, async_op, users, finish_all))


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
        group: the group, the world by default.
        async_op: return immediately; no array may be used before the Work's ``wait()`` returns.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: a list has another length, or its arrays another size or dtype.
        Exception: as for reduce_scatter.
    """
    comm = communicator(group, "reduce_scatter_multigpu")
    if comm is None:
        return None
    gpus = _gpus(group, output_tensor_list, op)
    outputs, write_backs = _outputs(gpus or comm, output_tensor_list, "output_tensor_list")
    count = len(outputs)
    _refuse_empty(input_tensor_lists, "input_tensor_lists")
    if len(input_tensor_lists) != count:
        raise ValueError(f"input_tensor_lists has {len(input_tensor_lists)} lists, but there are {count} outputs")
    lists = [
        _inputs(gpus or comm, inputs, f"input_tensor_lists[{number}]", outputs[0], comm.size * count)
        for number, inputs in enumerate(input_tensor_lists)
    ]
    reduce_op, factor = reduction(op, outputs[0].dtype)
    if factor is not None:
        lists = [[premultiplied(factor, array) for array in inputs] for inputs in lists]
    users = list(output_tensor_list)
    if gpus is not None:
        key = OpType.REDUCE_SCATTER, outputs[0].dtype, outputs[0].size, reduce_op
        each = [(output, inputs, reduce_op) for output, inputs in zip(outputs, lists, strict=True)]
        return gpus.submit_multigpu(key, each, write_backs, options(gpus, timeout, async_op, users))
    # For each rank: the arrays for its outputs in the first list, then those in the second, …
    mine = [
        np.concatenate([part for inputs in lists for part in inputs[rank * count : (rank + 1) * count]])
        for rank in range(comm.size)
    ]
    parts = [np.empty_like(array) for array in mine]

    def finish() -> None:
        pieces = _pieces(parts, count * count)
        for number, output in enumerate(outputs):
            with np.errstate(all="ignore"):
                combine(reduce_op, pieces[number::count], output)

    return comm.all_to_all(parts, mine, options(comm, timeout, async_op, users, chain([finish, *write_backs])))


# Arguments


def _gpus(group: Group, tensors: Tensors, op: ReduceOp | PremulSum | None = None) -> GpuCommunicator | None:
    """Return the communicator for arrays that are each on a GPU of their own; None if they go through host memory."""
    devices = [device_of(tensor) for tensor in tensors] if device_of(first_of(tensors)) is not None else []
    if not devices or devices[0] is None or None in devices or len(set(devices)) < len(devices):
        return None
    from rankmesh._session import gpu
    from rankmesh_agent.gpu import nccl

    if op is not None:
        dtype = buffer_of(tensors[0], "an array").device_array()[0].dtype
        if nccl.reduction(dtype, reduction(op, dtype).op) is None:
            return None
    return gpu.for_several_gpus(group, devices[0])


def _inputs(
    comm: Communicator, tensors: Tensors, name: str, like: Array | None = None, count: int | None = None
) -> list[Array]:
    """Return the elements of arrays of one size and dtype: those of ``like``, or of the first array."""
    _refuse_empty(tensors, name)
    return _check(
        [flat_in(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(tensors)], name, like, count
    )


def _outputs(
    comm: Communicator, tensors: Tensors, name: str, like: Array | None = None, count: int | None = None
) -> tuple[list[Array], WriteBacks]:
    """Return memory for results of one size and dtype, and for each what copies it back."""
    _refuse_empty(tensors, name)
    found = [flat_out(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(tensors)]
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


# Steps


def _premultiplied(
    arrays: list[Array], write_backs: WriteBacks, op: ReduceOp | PremulSum
) -> tuple[list[Array], WriteBacks, ReduceOp]:
    reduce_op, factor = reduction(op, arrays[0].dtype)
    if factor is None:
        return arrays, write_backs, reduce_op
    found = [premultiply(array, back, factor) for array, back in zip(arrays, write_backs, strict=True)]
    return [array for array, _ in found], [back for _, back in found], reduce_op


def _parts(comm: Communicator, arrays: Sequence[Array]) -> list[Array]:
    """Return memory for the concatenated arrays of each rank."""
    return [np.empty(len(arrays) * arrays[0].size, arrays[0].dtype) for _ in range(comm.size)]


def _pieces(parts: Sequence[Array], count: int) -> list[Array]:
    """Return the ``count`` arrays in each rank's part."""
    return [piece for part in parts for piece in np.split(part, count)]


def _reduce(reduce_op: ReduceOp, parts: Sequence[Array], count: int, outputs: Sequence[Array]) -> Callable[[], None]:
    """Return a function that reduces ``count`` arrays of each rank and copies the result to all outputs."""

    def finish() -> None:
        with np.errstate(all="ignore"):
            combine(reduce_op, _pieces(parts, count), outputs[0])
        _copy(outputs[0], outputs)()

    return finish


def _copy(array: Array, outputs: Sequence[Array]) -> Callable[[], None]:
    def run() -> None:
        for output in outputs:
            if output is not array:
                output[:] = array

    return run
