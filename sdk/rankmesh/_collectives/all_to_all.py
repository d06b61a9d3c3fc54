"""all_to_all and all_to_all_single: an array from every rank to every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import rankmesh._session.debug as _debug
from rankmesh._collectives.arguments import Timeout, communicator, first_of, inputs_of, options, outputs_of, same_dtype
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import as_int
from rankmesh._tensors.buffers import flat_in, flat_out, overlap
from rankmesh._tensors.layout import Array, shape_of
from rankmesh_agent.collectives.all_to_all import splits
from rankmesh_agent.group.communicator import ALL_TO_ALL
from rankmesh_agent.group.work import Work


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Send one array to every rank, and receive one from every rank.

    Args:
        output_tensor_list: one array a rank, by group rank: received from that rank. Must not overlap the inputs.
        input_tensor_list: one array a rank, by group rank: sent to that rank. Every pair of ranks may have a number of
            elements of its own; the dtype is the same everywhere.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: a list is not as long as the group, or an array has another dtype than the first.
        CollectiveMismatchError: a rank sends a peer another number of elements than that expects; raised on every rank.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "all_to_all", first_of(input_tensor_list))
    if comm is None:
        return None
    inputs = inputs_of(input_tensor_list, "input_tensor_list", comm)
    outputs, write_back = outputs_of(output_tensor_list, "output_tensor_list", comm)
    same_dtype(inputs[0], "input_tensor_list[0]", inputs, "input_tensor_list")
    same_dtype(inputs[0], "input_tensor_list[0]", outputs, "output_tensor_list")
    details = splits(outputs, inputs)
    return comm.all_to_all(
        outputs, inputs, options(comm, timeout, async_op, list(output_tensor_list), write_back, details)
    )


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
    """Split ``input`` along its first dimension, and send every rank its part.

    Args:
        output: array for the parts that this rank receives, concatenated in rank order.
        input: array, of the same dtype on all ranks.
        output_split_sizes: rows of ``output`` that come from each rank; None or empty for equal parts.
        input_split_sizes: rows of ``input`` for each rank; None or empty for equal parts.

    The other arguments, and the result, are those of all_reduce.

    Raises:
        ValueError: the split sizes are not one a rank, do not add up to the rows, or there are none and the rows do
            not divide evenly; or the arrays have different dtypes.
        CollectiveMismatchError: a rank sends a peer another number of elements than that expects; raised on every rank.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "all_to_all_single", input)
    if comm is None:
        return None
    plain = timeout is None and not async_op and output_split_sizes is input_split_sizes is None and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, ALL_TO_ALL, output, input):
        return None
    incoming = flat_in(input, "input", comm)
    outgoing, write_back = flat_out(output, "output", comm)
    same_dtype(incoming, "input", outgoing, "output")
    if overlap(incoming, outgoing):
        incoming = incoming.copy()
    inputs = _split(incoming, shape_of(input), input_split_sizes, "input", comm.size)
    outputs = _split(outgoing, shape_of(output), output_split_sizes, "output", comm.size)
    details = splits(outputs, inputs)
    return comm.all_to_all(outputs, inputs, options(comm, timeout, async_op, [output], write_back, details))


def _split(array: Array, shape: tuple[int, ...], sizes: Sequence[int] | None, name: str, size: int) -> list[Array]:
    """Return one view a rank: the rows of its split size."""
    rows = shape[0] if shape else 1
    if sizes is None or len(sizes) == 0:
        if rows % size:
            raise ValueError(
                f"{name} has {rows} rows, which do not divide evenly by the group's {size} ranks: give "
                f"{name}_split_sizes"
            )
        part = array.size // size
        return [array[begin : begin + part] for begin in range(0, size * part, part)] if part else [array] * size
    counts = [as_int(count, f"{name}_split_sizes[{number}]") for number, count in enumerate(sizes)]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name}_split_sizes={list(sizes)} must be {size} numbers, one a rank, that add up to the {rows} rows "
            f"of {name}"
        )
    width = array.size // rows if rows else 0
    ends = itertools.accumulate(counts, initial=0)
    return [array[begin * width : end * width] for begin, end in itertools.pairwise(ends)]


def only_for(rank: int, array: Array, size: int) -> list[Array]:
    """Return one array a rank, of which only that of ``rank`` has elements: an uneven gather's or scatter's part."""
    return [array if each == rank else array[:0] for each in range(size)]
