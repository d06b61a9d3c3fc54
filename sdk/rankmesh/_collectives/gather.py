"""Collectives that collect one array per rank: all_gather and gather, into lists or into one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rankmesh._session.debug as _debug
from rankmesh._collectives.all_to_all import only_for
from rankmesh._collectives.arguments import (
    Timeout,
    communicator,
    equal_parts,
    group_rank_of,
    options,
    outputs_of,
    refuse_list_off_root,
    same_dtype,
    same_dtype_and_size,
    same_size,
)
from rankmesh._session.process_group import Group
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh_agent.collectives.all_to_all import splits
from rankmesh_agent.group.communicator import ALL_GATHER
from rankmesh_agent.group.work import Work


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, async_op: bool = False, *, timeout: Timeout = None
) -> Work | None:
    """Copy every rank's ``tensor`` into ``tensor_list`` on all ranks.

    Args:
        tensor_list: one array a rank, by group rank, with as many elements as that rank's ``tensor`` and its dtype;
            ranks may differ in their number of elements.
        tensor: array, of the same dtype on all ranks.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``tensor_list`` is not as long as the group, or its array for this rank another size or
            another dtype than ``tensor``.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "all_gather", tensor)
    if comm is None:
        return None
    array = flat_in(tensor, "tensor", comm)
    outputs, write_back = outputs_of(tensor_list, "tensor_list", comm)
    same_dtype(array, "tensor", outputs, "tensor_list")
    same_size(array, "tensor", outputs[comm.rank], f"tensor_list[{comm.rank}]")
    return comm.all_gather(
        outputs, array, options(comm, timeout, async_op, list(tensor_list), write_back, inputs=[tensor])
    )


all_gather_v = all_gather
"""all_gather: its arrays may differ in size from rank to rank."""


def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False, *, timeout: Timeout = None
) -> Work | None:
    """Concatenate every rank's ``input_tensor`` in one array on all ranks, in rank order.

    Args:
        output_tensor: array with world size times the elements of ``input_tensor``: a concatenation, of shape
            (size * n, …), or a stack, of shape (size, n, …).
        input_tensor: array, with the same number of elements and dtype on all ranks; may be its part of the output.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``output_tensor`` has another size or dtype.
        Exception: as for all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_gather_into_tensor
    """
    comm = communicator(group, "all_gather_single", input_tensor)
    if comm is None:
        return None
    plain = timeout is None and not async_op and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, ALL_GATHER, output_tensor, input_tensor):
        return None
    array = flat_in(input_tensor, "input_tensor", comm)
    output, write_back = flat_out(output_tensor, "output_tensor", comm)
    same_dtype(array, "input_tensor", output, "output_tensor")
    outputs = equal_parts(output, "output_tensor", array.size, "input_tensor", comm.size)
    return comm.all_gather(outputs, array, options(comm, timeout, async_op, [output_tensor], write_back))


all_gather_into_tensor = all_gather_single
"""The older name of all_gather_single."""


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    uneven: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Copy every rank's ``tensor`` into ``gather_list`` on one rank.

    Args:
        tensor: array, with the same number of elements and dtype on all ranks; see ``uneven``.
        gather_list: on the destination, one such array a rank, by group rank; None or empty elsewhere.
        dst: global rank that gathers; 0 by default.
        group_dst: the destination's rank in the group, instead of ``dst``.
        uneven: the arrays may differ in length, like those of MPI's gatherv; given by all ranks alike. The arrays in
            ``gather_list`` are as long as the ranks' own. It is carried out, and reported, as an all_to_all.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``gather_list`` is missing on the destination, given elsewhere, or has another length, size or
            dtype; or the destination is not in the group.
        CollectiveMismatchError: if ``uneven``, also where a rank's array is longer or shorter than the destination's.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "gather", tensor)
    if comm is None:
        return None
    root = group_rank_of(comm, dst, group_dst, "dst", default=0)
    refuse_list_off_root(gather_list, "gather_list", comm.rank == root, "destination")
    array = flat_in(tensor, "tensor", comm)
    outputs, write_back = outputs_of(gather_list, "gather_list", comm) if comm.rank == root else ([], None)
    tensors = list(gather_list or [])
    if uneven:
        same_dtype(array, "tensor", outputs, "gather_list")
        sent = only_for(root, array, comm.size)
        received = outputs or only_for(-1, array, comm.size)
        details = splits(received, sent)
        return comm.all_to_all(
            received, sent, options(comm, timeout, async_op, tensors, write_back, details, inputs=[tensor])
        )
    same_dtype_and_size(array, "tensor", outputs, "gather_list")
    return comm.gather(outputs, array, root, options(comm, timeout, async_op, tensors, write_back, inputs=[tensor]))


def gather_single(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Concatenate every rank's ``tensor`` in one array on one rank, in rank order.

    Args:
        tensor: array, with the same number of elements and dtype on all ranks.
        gather_tensor: on the destination, array with world size times as many elements, as all_gather_single's
            ``output_tensor``; ignored elsewhere.

    The other arguments, and the result, are those of gather.

    Raises:
        ValueError: ``gather_tensor`` is missing on the destination, or has another size or dtype; or the destination is
            not in the group.
        Exception: as for all_reduce.

    Source: https://pytorch.org/docs/2.14/distributed.html#torch.distributed.gather_single
    """
    comm = communicator(group, "gather_single", tensor)
    if comm is None:
        return None
    root = group_rank_of(comm, dst, group_dst, "dst", default=0)
    array = flat_in(tensor, "tensor", comm)
    outputs, tensors, write_back = [], [], None
    if comm.rank == root:
        if gather_tensor is None:
            raise ValueError("gather_tensor is missing: on the destination rank give an array for all ranks' elements")
        output, write_back = flat_out(gather_tensor, "gather_tensor", comm)
        same_dtype(array, "tensor", output, "gather_tensor")
        outputs, tensors = equal_parts(output, "gather_tensor", array.size, "tensor", comm.size), [gather_tensor]
    return comm.gather(outputs, array, root, options(comm, timeout, async_op, tensors, write_back, inputs=[tensor]))


gather_into_tensor = gather_single
"""Another name of gather_single, which torch 2.14 has deprecated."""
