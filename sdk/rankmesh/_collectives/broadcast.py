"""Collectives that send from one rank: broadcast and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rankmesh._session.debug as _debug
from rankmesh._collectives.all_to_all import only_for
from rankmesh._collectives.arguments import (
    Timeout,
    communicator,
    group_rank_of,
    inputs_of,
    options,
    refuse_list_off_root,
    same_dtype,
    same_dtype_and_size,
)
from rankmesh._session.process_group import Group
from rankmesh._tensors.buffers import flat_in, flat_out
from rankmesh_agent.collectives.all_to_all import splits
from rankmesh_agent.group.communicator import BROADCAST
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
        group_src: the source's rank in the group, instead of ``src``.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the source is missing, given twice, or not in the group.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "broadcast", tensor)
    if comm is None:
        return None
    plain = timeout is None and not async_op and group_src is None and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, BROADCAST, tensor, tensor, None, src):
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
    uneven: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Send one array of one rank to each rank's ``tensor``.

    Args:
        tensor: array, with the same number of elements and dtype on all ranks; see ``uneven``.
        scatter_list: on the source, one such array a rank, by group rank; None or empty elsewhere.
        src: global rank that scatters; 0 by default.
        group_src: the source's rank in the group, instead of ``src``.
        uneven: the arrays may differ in length, like those of MPI's scatterv; given by all ranks alike. Each
            ``tensor`` is as long as the source's array for that rank. It is carried out, and reported, as an
            all_to_all.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: ``scatter_list`` is missing on the source, given elsewhere, or has another length, size or dtype;
            or the source is not in the group.
        CollectiveMismatchError: if ``uneven``, also where a rank's array is longer or shorter than the source's.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "scatter", tensor)
    if comm is None:
        return None
    root = group_rank_of(comm, src, group_src, "src", default=0)
    refuse_list_off_root(scatter_list, "scatter_list", comm.rank == root, "source")
    output, write_back = flat_out(tensor, "tensor", comm)
    inputs = inputs_of(scatter_list, "scatter_list", comm) if comm.rank == root else []
    if uneven:
        same_dtype(output, "tensor", inputs, "scatter_list")
        received = only_for(root, output, comm.size)
        sent = inputs or only_for(-1, output, comm.size)
        details = splits(received, sent)
        return comm.all_to_all(received, sent, options(comm, timeout, async_op, [tensor], write_back, details))
    same_dtype_and_size(output, "tensor", inputs, "scatter_list")
    return comm.scatter(output, inputs, root, options(comm, timeout, async_op, [tensor], write_back))
