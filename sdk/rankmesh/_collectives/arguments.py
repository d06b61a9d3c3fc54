"""Arguments that all calls share: group, ranks, lists of arrays, and options."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

import rankmesh._session.debug as _debug
import rankmesh._session.session as _session
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.process_group import Group, NonMember, ProcessGroup
from rankmesh._session.ranks import as_int
from rankmesh._session.session import communicator_of
from rankmesh._tensors.buffers import buffer_of, device_of, flat_in, flat_out
from rankmesh._tensors.layout import Array, WriteBack
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Details, Options
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

Timeout = timedelta | float | None


def communicator(
    group: Group, called: str, tensor: Any = None, op: ReduceOp | PremulSum | None = None
) -> Communicator | None:
    """Return a group's communicator; warn and return None if this process is not a member.

    The device of ``tensor`` selects it; ``op`` is the reduction, which not every library for GPUs has.
    """
    if group is None and (default := _session._default) is not None:
        group = default.group
    if type(group) is ProcessGroup:
        comm = group._communicator
    elif isinstance(group, NonMember):
        warnings.warn(
            f"{called}() does nothing on this rank, which is not a member of the group", RuntimeWarning, stacklevel=3
        )
        return None
    else:
        comm = communicator_of(group)
    if tensor is None or type(tensor) is np.ndarray or (device := device_of(tensor)) is None:
        return comm
    comm = _on_gpus()(group, device)
    if op is None or not comm.on_device:
        return comm
    dtype = buffer_of(tensor, "tensor").dtype()
    return comm.for_reduction(dtype, reduction(op, dtype).op)


@functools.cache
def _on_gpus() -> Callable[[Group, int], Communicator]:
    """Return ``for_collectives``, whose module is imported when the first array on a GPU is passed."""
    from rankmesh._session.gpu import for_collectives

    return for_collectives


def options(
    comm: Communicator,
    timeout: Timeout,
    async_op: bool,
    tensors: list[Any],
    write_back: WriteBack | None = None,
    details: Details = None,
    inputs: Sequence[Any] = (),
) -> Options:
    """Return the options of a call, before it begins.

    Args:
        comm: the communicator, whose timeout is the default.
        tensors: the user's tensors that the call writes to (else those it reads), for Work.result() and errors.
        details: describes the arguments that only this rank knows, for errors about calls that do not match.
    """
    plain = comm.default_options if timeout is None else comm.options_within(timeout)
    if write_back is None and details is None and not async_op and _debug.below_detail and comm.batch is None:
        return plain
    shapes = _debug.details_of([*inputs, *tensors] if inputs else tensors)
    if details is None or shapes is None:
        return Options(plain.timeout, async_op, tensors, write_back, details or shapes)
    splits, site = details, shapes  # the site first: long splits are cut off
    return Options(plain.timeout, async_op, tensors, write_back, lambda: f"{site()}, {splits()}")


def chain(steps: Sequence[WriteBack | None]) -> WriteBack | None:
    """Return a function that runs all steps that are not None, in order; None if there are none."""
    found = [step for step in steps if step is not None]
    if len(found) < 2:
        return found[0] if found else None

    def run() -> None:
        for step in found:
            step()

    return run


# Ranks


def group_rank_of(
    comm: Communicator, rank: int | None, group_rank: int | None, name: str, default: int | None = None
) -> int:
    """Return the group rank of a rank that is given globally or in the group; None where it is not."""
    ranks = comm.state.global_ranks
    if type(rank) is int and group_rank is None and rank in ranks:  # nearly all
        return ranks.index(rank)
    if rank is not None and group_rank is not None:
        raise ValueError(f"give {name} (a global rank) or group_{name} (a rank in the group), not both")
    if group_rank is not None:
        if not 0 <= as_int(group_rank, f"group_{name}") < comm.size:
            raise ValueError(f"group_{name}={group_rank} is not in the group, whose ranks are 0 to {comm.size - 1}")
        return group_rank
    if rank is None:
        rank = default
    if rank is None:
        raise ValueError(f"{name} is missing: give {name} (a global rank) or group_{name} (a rank in the group)")
    if as_int(rank, name) not in ranks:
        raise ValueError(f"{name}={rank} is not in the group, whose ranks are {list(ranks)}")
    return ranks.index(rank)


def other_rank_of(comm: Communicator, rank: int | None, group_rank: int | None, name: str, what: str) -> int:
    """Return the group rank of a message's other side, which is not this rank; see group_rank_of."""
    found = group_rank_of(comm, rank, group_rank, name)
    if found == comm.rank:
        raise ValueError(f"{name} is this rank: the call waits, and would wait for itself; copy the {what} instead")
    return found


# Lists of arrays


def check_list(
    items: Any, name: str, size: int | None = None, noun: str = "arrays", kinds: tuple[type[Any], ...] = (list, tuple)
) -> Any:
    """Return an argument that has to be a list, of one item per rank if ``size`` is given.

    ``kinds`` are the types it may have: ``(list,)`` if the call replaces items.
    """
    if not isinstance(items, kinds):
        wanted = noun if size is None else f"{size} {noun}, one a rank"
        raise TypeError(f"{name} must be a list of {wanted}, got {type(items).__qualname__}")
    if size is not None and len(items) != size:
        raise ValueError(f"{name} has {len(items)} {noun}, but the group has {size} ranks")
    return items


def first_of(tensors: Any) -> Any:
    """Return the first array of a list argument, None if it is empty or not a list."""
    return tensors[0] if isinstance(tensors, list | tuple) and tensors else None


def inputs_of(tensors: Any, name: str, comm: Communicator) -> list[Array]:
    """Return the elements of one array per rank."""
    given = check_list(tensors, name, comm.size)
    return [flat_in(tensor, f"{name}[{number}]", comm) for number, tensor in enumerate(given)]


def outputs_of(tensors: Any, name: str, comm: Communicator) -> tuple[list[Array], WriteBack | None]:
    """Return memory for one result per rank, and what copies them back."""
    given = check_list(tensors, name, comm.size)
    arrays, steps = [], []
    for number, tensor in enumerate(given):
        array, write_back = flat_out(tensor, f"{name}[{number}]", comm)
        arrays.append(array)
        if write_back is not None:
            steps.append(write_back)
    return arrays, chain(steps) if steps else None


def refuse_list_off_root(tensors: Any, name: str, is_root: bool, root: str) -> None:
    """Require a list on the root, and none elsewhere."""
    if is_root and tensors is None:
        raise ValueError(f"{name} is missing: on the {root} rank give a list of one array a rank")
    if not is_root and tensors is not None and len(tensors):
        raise ValueError(f"{name} is only for the {root} rank: leave it out on this one")


def same_dtype(array: Array, name: str, others: Array | list[Array], others_name: str) -> None:
    """Require the dtype of an array for another one, or for each of a list."""
    dtype = array.dtype
    for number, other in enumerate(others if isinstance(others, list) else (others,)):
        if other.dtype is not dtype and other.dtype != dtype:
            other_name = f"{others_name}[{number}]" if isinstance(others, list) else others_name
            raise ValueError(
                f"{other_name} has dtype {display(other.dtype)}, but {name} has {display(dtype)}: "
                "all must have the same"
            )


def same_size(array: Array, name: str, other: Array, other_name: str) -> None:
    """Require two arrays with the same number of elements."""
    if array.size != other.size:
        raise ValueError(
            f"{other_name} has {other.size} elements, but {name} has {array.size}: they must have the same number"
        )


def same_dtype_and_size(array: Array, name: str, others: list[Array], others_name: str) -> None:
    """Require arrays of the dtype and the number of elements of another."""
    same_dtype(array, name, others, others_name)
    for number, other in enumerate(others):
        if other.size != array.size:  # the other's name is formatted only if it is needed
            same_size(array, name, other, f"{others_name}[{number}]")


def equal_parts(array: Array, name: str, part: int, part_name: str, size: int) -> list[Array]:
    """Return ``size`` views of ``part`` elements each."""
    if array.size != size * part:
        raise ValueError(
            f"{name} has {array.size} elements, but must have {size} times the {part} of {part_name}, {size * part}"
        )
    return [array[rank * part : (rank + 1) * part] for rank in range(size)]
