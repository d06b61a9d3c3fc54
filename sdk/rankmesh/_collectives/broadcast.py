"""Collectives that send from one rank: broadcast and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmesh._collectives.arguments import (
    Timeout,
    communicator,
    group_rank_of,
    inputs_of,
    options,
    refuse_list_off_root,
    same_dtype,
    same_size,
)
from rankmesh._session.process_group import Group
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh_agent.group.work import Work


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy ``tensor`` of one rank to all ranks.

    Args:
        tensor: array with the same number of elements and dtype on all ranks; read on the source, written elsewhere.
        src: global rank whose data is copied.
        group: the group, the world by default.
        async_op: return immediately; ``tensor`` must not be used before the Work's ``wait()`` returns.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: the source is missing, given twice, or not in the group.
        Exception: as for all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.broadcast
    """
    comm = communicator(group, "broadcast", tensor)
    if comm is None:
        return None
    root = group_rank_of(comm, src, group_src, "src")
    array, write_back = (
        (flat_in(tensor, "tensor", comm), None) if comm.rank == root else flat_out(tensor, "tensor", comm)
    )
    return comm.broadcast(array, root, options(comm, timeout, async_op, [tensor], write_back))


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send one array of one rank to each rank's ``tensor``. The ranks' arrays may differ in length, as for gather.

    Args:
        tensor: array, of the same dtype on all ranks; on GPUs, and over backend "mpi" below debug level DETAIL, also
            with the same number of elements.
        scatter_list: on the source, one array a rank, by group rank, with as many elements as that rank's ``tensor``
            and its dtype; None or empty elsewhere.
        src: global rank that scatters; 0 by default.
        group: the group, the world by default.
        async_op: return immediately; no array may be used before the Work's ``wait()`` returns.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        ValueError: ``scatter_list`` is missing on the source, given elsewhere, or not as long as the group; its array
            for this rank has another size than ``tensor``, or one of them another dtype; or the source is not in the
            group.
        CollectiveMismatchError: a rank's ``tensor`` has another size than the source's array for it.
        Exception: as for all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.scatter
    """
    comm = communicator(group, "scatter", tensor)
    if comm is None:
        return None
    root = group_rank_of(comm, src, group_src, "src", default=0)
    refuse_list_off_root(scatter_list, "scatter_list", comm.rank == root, "source")
    output, write_back = flat_out(tensor, "tensor", comm)
    inputs = inputs_of(scatter_list, "scatter_list", comm) if comm.rank == root else []
    same_dtype(output, "tensor", inputs, "scatter_list")
    if inputs:
        same_size(output, "tensor", inputs[root], f"scatter_list[{root}]")
    return comm.scatter(output, inputs, root, options(comm, timeout, async_op, [tensor], write_back))
