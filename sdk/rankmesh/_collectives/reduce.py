"""Reductions: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rankmesh._session.debug as _debug
from rankmesh._collectives.arguments import (
    Timeout,
    chain,
    communicator,
    equal_parts,
    group_rank_of,
    inputs_of,
    options,
    same_dtype,
    same_size,
)
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.process_group import Group
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh._tensors.layout import Array, WriteBack
from rankmesh_agent.collectives.reduction import premultiplied
from rankmesh_agent.group.communicator import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import PremulSum, ReduceOp


def all_reduce(
    tensor: Any,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place: the result is the same, bit for bit, on every rank.

    SUM is the default. AVG of integers is an integer, rounded towards zero: that of 1 and 2 is 1.

    In shared memory, elements are reduced in rank order. The summation order over TCP (above 64 KiB: tree or ring) and
    over several hosts (host by host) depends on the algorithm, so the last bits of floating-point sums may differ.
    float16, bfloat16 and float8 are accumulated in float32 and rounded once. Integers wrap around, except with AVG,
    which accumulates in 64 bits and rounds towards zero. SUM and PRODUCT of bool are 'or' and 'and'.

    Args:
        tensor: array of any shape, with the same number of elements and dtype on all ranks: a NumPy array, a torch
            tensor, a CuPy array, or any object that exports a writable buffer or DLPack; not contiguous ones through a
            copy. On GPUs the call is enqueued on the current stream: see docs/gpu.md.
        op: SUM, PRODUCT or AVG of integers (AVG not of bool), floats and complex numbers; MIN or MAX of integers, bool
            and floats; BAND, BOR or BXOR of integers and bool; ``ReduceOp.PREMUL_SUM(factor)``, the sum of
            each rank's elements times its own factor.
        group: the group, the world by default.
        async_op: return immediately; no array of the call may be used before the Work's ``wait()`` returns.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        TypeError: ``tensor`` is not an array that can be communicated, or ``op`` is not defined for its dtype.
        ValueError: ``tensor`` is read-only.
        CollectiveMismatchError: the ranks did not make the same call.
        RankFailedError: a rank died or left; names it.
        CollectiveTimeoutError: a rank did not make the call in time; names it.
        DistBackendError: the group failed earlier; repeats the first failure.
    """
    comm = communicator(group, "all_reduce", tensor, op)
    if comm is None:
        return None
    plain = timeout is None and not async_op and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, ALL_REDUCE, tensor, tensor, op):
        return None
    array, write_back = flat_out(tensor, "tensor", comm)
    if type(op) is not ReduceOp or op is ReduceOp.PREMUL_SUM:
        op, factor = reduction(op, array.dtype)
        if factor is not None:
            array, write_back = premultiply(array, write_back, factor)
    if plain and write_back is None and comm.batch is None:
        return comm.all_reduce(array, op, comm.default_options)  # as options() returns them, without the call
    return comm.all_reduce(array, op, options(comm, timeout, async_op, [tensor], write_back))


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into that of one rank; the others are unchanged.

    AVG of integers is rounded towards zero.

    Args:
        tensor: as for all_reduce; written on the destination only.
        dst: global rank that gets the result.
        group_dst: the destination's rank in the group, instead of ``dst``.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the destination is missing, given twice, or not in the group.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "reduce", tensor, op)
    if comm is None:
        return None
    plain = timeout is None and not async_op and group_dst is None and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, REDUCE, tensor, tensor, op, dst):
        return None
    root = group_rank_of(comm, dst, group_dst, "dst")
    receives = comm.rank == root
    array, write_back = flat_out(tensor, "tensor", comm) if receives else (flat_in(tensor, "tensor", comm), None)
    reduce_op, factor = reduction(op, array.dtype)
    if factor is not None and receives:
        array, write_back = premultiply(array, write_back, factor)
    elif factor is not None:
        array = premultiplied(factor, array)
    return comm.reduce(array, reduce_op, root, options(comm, timeout, async_op, [tensor], write_back))


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce one array per rank over all ranks; each rank's ``output`` gets the result for it.

    Args:
        output: array that gets the reduction of all ranks' ``input_list[this group rank]``.
        input_list: one array a rank, by group rank, with as many elements as that rank's ``output`` and its dtype;
            ranks may differ in their number of elements.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``input_list`` is not as long as the group, or its array for this rank another size or
            another dtype than ``output``.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "reduce_scatter", output, op)
    if comm is None:
        return None
    inputs = inputs_of(input_list, "input_list", comm)
    array, write_back = flat_out(output, "output", comm)
    same_dtype(array, "output", inputs, "input_list")
    same_size(array, "output", inputs[comm.rank], f"input_list[{comm.rank}]")
    reduce_op, factor = reduction(op, array.dtype)
    if factor is not None:
        inputs = [premultiplied(factor, part) for part in inputs]
    return comm.reduce_scatter(array, inputs, reduce_op, options(comm, timeout, async_op, [output], write_back))


reduce_scatter_v = reduce_scatter
"""reduce_scatter: its arrays may differ in size from rank to rank."""


def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``input`` over all ranks; each rank gets its share of the result.

    Args:
        output: array that gets the share, of the same size and dtype on all ranks.
        input: array with world size times the elements of ``output``: a concatenation, of shape (size * n, …), or a
            stack, of shape (size, n, …). ``output`` may be its part of it.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``input`` has another size or dtype.
        Exception: as for all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.reduce_scatter_tensor
    """
    comm = communicator(group, "reduce_scatter_single", output, op)
    if comm is None:
        return None
    plain = timeout is None and not async_op and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, REDUCE_SCATTER, output, input, op):
        return None
    whole_input = flat_in(input, "input", comm)
    array, write_back = flat_out(output, "output", comm)
    same_dtype(array, "output", whole_input, "input")
    reduce_op, factor = reduction(op, array.dtype)
    if factor is not None:
        whole_input = premultiplied(factor, whole_input)
    inputs = equal_parts(whole_input, "input", array.size, "output", comm.size)
    return comm.reduce_scatter(array, inputs, reduce_op, options(comm, timeout, async_op, [output], write_back))


reduce_scatter_tensor = reduce_scatter_single
"""The older name of reduce_scatter_single."""


def premultiply(array: Array, write_back: WriteBack | None, factor: complex) -> tuple[Array, WriteBack | None]:
    """Return ``array`` times ``factor`` to be reduced, a copy in host memory, and what copies the result back."""
    product = premultiplied(factor, array)
    if not isinstance(product, np.ndarray):
        return product, write_back  # in place, on a GPU

    def copy_back() -> None:
        array[:] = product

    return product, chain([copy_back, write_back])
