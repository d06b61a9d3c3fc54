"""The collectives in which a rank has an array for, or of, each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rankmesh._collectives.arguments import Timeout, all_of, first, group_root, listed, members_of, options, whole
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.session import Group
from rankmesh._tensors.arrays import destination, overlap, shape_of, source
from rankmesh._tensors.containers import Array
from rankmesh_agent.collectives.reduction import premultiplied
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy every rank's ``tensor`` into ``tensor_list`` on all ranks.

    Args:
        tensor_list: one array a rank, by group rank, with as many elements as that rank's ``tensor`` and its dtype;
            ranks may differ in their number of elements.
        tensor: array, of the same dtype on all ranks.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``tensor_list`` has another length than the group, or its array for this rank another size or
            another dtype than ``tensor``.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_gather
    """
    comm = members_of(group, "all_gather", tensor)
    if comm is None:
        return None
    array = source(tensor, "tensor", comm)
    outputs, after = _outputs(tensor_list, "tensor_list", comm)
    _same_dtype([array, *outputs], "tensor", "tensor_list")
    _same_size(array, "tensor", outputs[comm.rank], f"tensor_list[{comm.rank}]")
    return comm.all_gather(outputs, array, options(comm, timeout, async_op, list(tensor_list), after, inputs=[tensor]))


all_gather_v = all_gather
"""all_gather: its arrays may differ in size from rank to rank."""


def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False, *, timeout: Timeout = None
) -> Work | None:
    """Copy every rank's ``input_tensor`` into one array on all ranks, behind one another in rank order.

    Args:
        output_tensor: array with world size times the elements of ``input_tensor``: a concatenation, of shape
            (size * n, …), or a stack, of shape (size, n, …).
        input_tensor: array, with the same number of elements and dtype on all ranks; may be its part of the output.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``output_tensor`` has another size or dtype.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_gather_into_tensor
    """
    comm = members_of(group, "all_gather_single", input_tensor)
    if comm is None:
        return None
    array = source(input_tensor, "input_tensor", comm)
    output, after = destination(output_tensor, "output_tensor", comm)
    _same_dtype([array, output], "input_tensor", "output_tensor")
    outputs = _even(output, "output_tensor", array.size, "input_tensor", comm.size)
    return comm.all_gather(outputs, array, options(comm, timeout, async_op, [output_tensor], after))


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
    timeout: Timeout = None,
) -> Work | None:
    """Copy every rank's ``tensor`` into ``gather_list`` on one rank.

    Args:
        tensor: array, with the same number of elements and dtype on all ranks.
        gather_list: on the destination, one such array a rank, by group rank; None or empty elsewhere.
        dst: global rank that gathers; 0 by default.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        group_dst: the destination's rank in the group, instead of ``dst``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``gather_list`` is missing on the destination, given elsewhere, or has another length, size or
            dtype; or the destination is not in the group.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.gather
    """
    comm = members_of(group, "gather", tensor)
    if comm is None:
        return None
    root = group_root(comm, dst, group_dst, "dst", default=0)
    _on_root_only(gather_list, "gather_list", comm.rank == root, "destination")
    array = source(tensor, "tensor", comm)
    outputs, after = _outputs(gather_list, "gather_list", comm) if comm.rank == root else ([], None)
    _all_alike(array, "tensor", outputs, "gather_list")
    how = options(comm, timeout, async_op, list(gather_list or []), after, inputs=[tensor])
    return comm.gather(outputs, array, root, how)


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
    """Copy each rank's own one of the arrays that one rank has into ``tensor``.

    Args:
        tensor: array, with the same number of elements and dtype on all ranks.
        scatter_list: on the source, one such array a rank, by group rank; None or empty elsewhere.
        src: global rank that scatters; 0 by default.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``scatter_list`` is missing on the source, given elsewhere, or has another length, size or dtype;
            or the source is not in the group.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.scatter
    """
    comm = members_of(group, "scatter", tensor)
    if comm is None:
        return None
    root = group_root(comm, src, group_src, "src", default=0)
    _on_root_only(scatter_list, "scatter_list", comm.rank == root, "source")
    output, after = destination(tensor, "tensor", comm)
    inputs = _inputs(scatter_list, "scatter_list", comm) if comm.rank == root else []
    _all_alike(output, "tensor", inputs, "scatter_list")
    return comm.scatter(output, inputs, root, options(comm, timeout, async_op, [tensor], after))


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the arrays that all ranks have for each rank into that rank's ``output``.

    Args:
        output: array that gets the reduction of all ranks' ``input_list[this group rank]``.
        input_list: one array a rank, by group rank, with as many elements as that rank's ``output`` and its dtype;
            ranks may differ in their number of elements.
        op: as for all_reduce.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``input_list`` has another length than the group, or its array for this rank another size or
            another dtype than ``output``.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.reduce_scatter
    """
    comm = members_of(group, "reduce_scatter", output)
    if comm is None:
        return None
    inputs = _inputs(input_list, "input_list", comm)
    array, after = destination(output, "output", comm)
    _same_dtype([array, *inputs], "output", "input_list")
    _same_size(array, "output", inputs[comm.rank], f"input_list[{comm.rank}]")
    how, factor = reduction(op, array.dtype)
    if factor is not None:
        inputs = [premultiplied(factor, part) for part in inputs]
    return comm.reduce_scatter(array, inputs, how, options(comm, timeout, async_op, [output], after))


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
        op: as for all_reduce.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: ``input`` has another size or dtype.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.reduce_scatter_tensor
    """
    comm = members_of(group, "reduce_scatter_single", output)
    if comm is None:
        return None
    whole_input = source(input, "input", comm)
    array, after = destination(output, "output", comm)
    _same_dtype([array, whole_input], "output", "input")
    how, factor = reduction(op, array.dtype)
    if factor is not None:
        whole_input = premultiplied(factor, whole_input)
    inputs = _even(whole_input, "input", array.size, "output", comm.size)
    return comm.reduce_scatter(array, inputs, how, options(comm, timeout, async_op, [output], after))


reduce_scatter_tensor = reduce_scatter_single
"""The older name of reduce_scatter_single."""


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Give every rank the array that this rank has for it.

    Args:
        output_tensor_list: one array a rank, by group rank: what that rank has for this one. Must not overlap the
            inputs.
        input_tensor_list: one array a rank, by group rank: what this rank has for that one. Every pair of ranks may
            have a number of elements of its own; the dtype is the same everywhere.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: a list has another length than the group, or an array another dtype than the first.
        CollectiveMismatchError: a rank has another number of elements for a peer than that expects; on every rank.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_to_all
    """
    comm = members_of(group, "all_to_all", first(input_tensor_list))
    if comm is None:
        return None
    inputs = _inputs(input_tensor_list, "input_tensor_list", comm)
    outputs, after = _outputs(output_tensor_list, "output_tensor_list", comm)
    _same_dtype(inputs, "input_tensor_list[0]", "input_tensor_list")
    _same_dtype([inputs[0], *outputs], "input_tensor_list[0]", "output_tensor_list")
    how = options(comm, timeout, async_op, list(output_tensor_list), after, _splits(outputs, inputs))
    return comm.all_to_all(outputs, inputs, how)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Split ``input`` along its first dimension, and give every rank its part.

    Args:
        output: array that gets the parts of all ranks for this one, behind one another in rank order.
        input: array, of the same dtype on all ranks.
        output_split_sizes: rows of ``output`` that come from each rank; None or empty for equal parts.
        input_split_sizes: rows of ``input`` for each rank; None or empty for equal parts.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the split sizes are not one a rank, do not add up to the rows, or there are none and the rows do
            not divide evenly; or the arrays have different dtypes.
        CollectiveMismatchError: a rank has another number of elements for a peer than that expects; on every rank.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_to_all_single
    """
    comm = members_of(group, "all_to_all_single", input)
    if comm is None:
        return None
    incoming = source(input, "input", comm)
    outgoing, after = destination(output, "output", comm)
    _same_dtype([incoming, outgoing], "input", "output")
    if overlap(incoming, outgoing):
        incoming = incoming.copy()
    inputs = _split(incoming, shape_of(input), input_split_sizes, "input", comm.size)
    outputs = _split(outgoing, shape_of(output), output_split_sizes, "output", comm.size)
    how = options(comm, timeout, async_op, [output], after, _splits(outputs, inputs))
    return comm.all_to_all(outputs, inputs, how)


# Arguments


def _outputs(tensors: Any, name: str, comm: Communicator) -> tuple[list[Array], Callable[[], None] | None]:
    given = listed(tensors, name, comm.size)
    found = [destination(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(given)]
    return [array for array, _ in found], all_of([after for _, after in found])


def _inputs(tensors: Any, name: str, comm: Communicator) -> list[Array]:
    given = listed(tensors, name, comm.size)
    return [source(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(given)]


def _on_root_only(tensors: Any, name: str, is_root: bool, root: str) -> None:
    if is_root and tensors is None:
        raise ValueError(f"{name} is missing: on the {root} rank give a list of one array a rank")
    if not is_root and tensors is not None and len(tensors):
        raise ValueError(f"{name} is only for the {root} rank: leave it out on this one")


def _same_dtype(arrays: Sequence[Array], first: str, name: str) -> None:
    dtype = arrays[0].dtype
    for number, array in enumerate(arrays):
        if array.dtype is not dtype and array.dtype != dtype:
            raise ValueError(
                f"{name} has dtype {display(array.dtype)} at {number}, but {first} has {display(dtype)}: "
                "all must have the same"
            )


def _same_size(array: Array, name: str, other: Array, other_name: str) -> None:
    if array.size != other.size:
        raise ValueError(
            f"{other_name} has {other.size} elements, but {name} has {array.size}: they must have the same number"
        )


def _all_alike(array: Array, name: str, others: Sequence[Array], others_name: str) -> None:
    _same_dtype([array, *others], name, others_name)
    for number, other in enumerate(others):
        if other.size != array.size:  # the other's name is made only where it is needed
            _same_size(array, name, other, f"{others_name}[{number}]")


def _even(array: Array, name: str, part: int, part_name: str, size: int) -> list[Array]:
    """Return ``size`` views of ``part`` elements each."""
    if array.size != size * part:
        raise ValueError(
            f"{name} has {array.size} elements, but must have {size} times the {part} of {part_name}, {size * part}"
        )
    return [array[rank * part : (rank + 1) * part] for rank in range(size)]


def _split(array: Array, shape: tuple[int, ...], sizes: Sequence[int] | None, name: str, size: int) -> list[Array]:
    """Return one view a rank of the rows that the split sizes give it."""
    rows = shape[0] if shape else 1
    if sizes is None or len(sizes) == 0:
        if rows % size:
            raise ValueError(
                f"{name} has {rows} rows, which do not divide evenly by the group's {size} ranks: give "
                f"{name}_split_sizes"
            )
        part = array.size // size
        return [array[begin : begin + part] for begin in range(0, size * part, part)] if part else [array] * size
    counts = [whole(count, f"{name}_split_sizes[{number}]") for number, count in enumerate(sizes)]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name}_split_sizes={list(sizes)} must be {size} numbers, one a rank, that add up to the {rows} rows "
            f"of {name}"
        )
    width = array.size // rows if rows else 0
    ends = itertools.accumulate(counts, initial=0)
    return [array[begin * width : end * width] for begin, end in itertools.pairwise(ends)]


def _splits(outputs: Sequence[Array], inputs: Sequence[Array]) -> Callable[[], str]:
    """Return what says how many elements go where: what no rank can know of another before the call."""
    return lambda: (
        f"sends {[part.size for part in inputs]} elements to the ranks and expects {[part.size for part in outputs]}"
    )
