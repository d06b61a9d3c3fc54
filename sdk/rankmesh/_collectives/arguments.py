"""What every call has in common: whose group it is, which ranks it names, and how it is to be made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

import rankmesh._session.debug as _debug
import rankmesh._session.session as _session
from rankmesh._session.session import Group, NonMember, communicator
from rankmesh._tensors.arrays import SUPPORTED, destination
from rankmesh._tensors.containers import Array, device_of
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.pending import Details, OnComplete
from rankmesh_agent.net.deadline import seconds_of

Timeout = timedelta | float | None
_NO_OPTIONS = Options(0.0)


def in_place(
    group: Group, called: str, tensor: Any, timeout: Timeout, async_op: bool
) -> tuple[Communicator | None, Array, Options]:
    """Return the communicator, the elements and the options of a call on one tensor, which it overwrites.

    Args:
        group: the group.
        called: the function that the user called.
        tensor: the tensor.
        timeout: how long the call may take.
        async_op: whether it returns at once.

    Returns:
        The communicator is None, after a warning, if this process is not a member of the group.

    Raises:
        TypeError: ``tensor`` is no array that can be communicated, or ``group`` is not a group.
        ValueError: ``tensor`` is read-only, the timeout is negative, or init_process_group has not been called.
    """
    world = _session._world
    if group is None and world is not None and type(tensor) is np.ndarray:
        comm: Communicator | None = world.group._communicator  # as members_of would return it, without a call
    else:
        comm = members_of(group, called, tensor, level=4)
    if comm is None:
        return None, np.empty(0), _NO_OPTIONS
    write_back = None
    if type(tensor) is np.ndarray and tensor.flags.carray and tensor.dtype in SUPPORTED:
        array: Array = tensor if tensor.ndim == 1 else tensor.reshape(-1)
    else:
        array, write_back = destination(tensor, "tensor", comm)
    if timeout is None and not async_op and write_back is None and _debug.plain and not comm.recording:
        return comm, array, comm.default_options
    return comm, array, options(comm, timeout, async_op, [tensor], write_back)


def members_of(group: Group, called: str, tensor: Any = None, level: int = 3) -> Communicator | None:
    """Return what carries out a group's calls; warn and return None if this process is not a member.

    Args:
        group: the group.
        called: the function that the user called.
        tensor: an array of the call's, which says where they are; None for a call without any. Of lists, ``first``.
        level: how many frames up the user's call is, for the warning.

    Raises:
        ValueError: init_process_group has not been called.
        TypeError: ``group`` is not a group.
    """
    if isinstance(group, NonMember):
        warnings.warn(
            f"{called}() does nothing on this rank, which is not a member of the group",
            RuntimeWarning,
            stacklevel=level,
        )
        return None
    if tensor is None or type(tensor) is np.ndarray or (device := device_of(tensor)) is None:
        return communicator(group)
    from rankmesh._tensors.cuda import collectives

    return collectives(group, device)


def first(tensors: Any) -> Any:
    """Return the first of a call's arrays, None if there is none to be seen yet."""
    return tensors[0] if isinstance(tensors, list | tuple) and tensors else None


def group_root(
    comm: Communicator, rank: int | None, group_rank: int | None, name: str, default: int | None = None
) -> int:
    """Return the group rank of the rank a call names, globally or in the group.

    Args:
        comm: the group.
        rank: the global rank, None if not given.
        group_rank: the rank in the group, None if not given.
        name: ``src`` or ``dst``.
        default: the global rank if neither is given.

    Raises:
        ValueError: both are given, or none and there is no default; or it is not a member.
        TypeError: it is no whole number.
    """
    if rank is not None and group_rank is not None:
        raise ValueError(f"give {name} (a global rank) or group_{name} (a rank in the group), not both")
    if group_rank is not None:
        if not 0 <= whole(group_rank, f"group_{name}") < comm.size:
            raise ValueError(f"group_{name}={group_rank} is not in the group, whose ranks are 0 to {comm.size - 1}")
        return group_rank
    if rank is None:
        rank = default
    if rank is None:
        raise ValueError(f"{name} is missing: give {name} (a global rank) or group_{name} (a rank in the group)")
    ranks = comm.global_ranks
    if whole(rank, name) not in ranks:
        raise ValueError(f"{name}={rank} is not in the group, whose ranks are {list(ranks)}")
    return ranks.index(rank)


def whole(number: Any, name: str) -> int:
    """Return a whole number.

    Raises:
        TypeError: it is none.
    """
    if type(number) is int:
        return number
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {number!r}")
    return int(number.__index__())


def listed(
    items: Any, name: str, size: int | None = None, what: str = "arrays", kinds: tuple[type[Any], ...] = (list, tuple)
) -> Any:
    """Return a list that a call was given.

    Args:
        items: the list.
        name: the argument's name.
        size: the group's, where the list has one item a rank; None where it may have any length.
        what: what is in it.
        kinds: what it may be; ``(list,)`` where items are put into it.

    Raises:
        TypeError: it is no list.
        ValueError: it has not got one item a rank.
    """
    if not isinstance(items, kinds):
        wanted = what if size is None else f"{size} {what}, one a rank"
        raise TypeError(f"{name} must be a list of {wanted}, got {type(items).__qualname__}")
    if size is not None and len(items) != size:
        raise ValueError(f"{name} has {len(items)} {what}, but the group has {size} ranks")
    return items


def options(
    comm: Communicator,
    timeout: Timeout,
    async_op: bool,
    tensors: list[Any],
    after: OnComplete = None,
    note: Details = None,
    inputs: Sequence[Any] = (),
) -> Options:
    """Return how a call is to be made.

    Args:
        comm: the group, whose timeout is the default.
        timeout: how long it may take.
        async_op: whether it returns at once.
        tensors: the user's that are written to, or where there are none read, for Work.result() and for errors.
        after: what to do once the data is there.
        note: what the call itself has to say when the ranks' calls do not fit together.
        inputs: more of the user's tensors, for errors.

    Raises:
        ValueError: the timeout is negative.
    """
    if _debug.plain and timeout is None and not async_op and after is None and note is None and not comm.recording:
        return comm.default_options  # nearly all calls; made once
    detail = _debug.note_of([*inputs, *tensors] if inputs else tensors)
    limit = comm.timeout if timeout is None else seconds_of(timeout, comm.timeout)
    if note is None or detail is None:
        return Options(limit, async_op, tensors, after, note or detail)
    splits, site = note, detail  # the site first: long splits are cut off
    return Options(limit, async_op, tensors, after, lambda: f"{site()}, {splits()}")


def all_of(steps: Sequence[Callable[[], None] | None]) -> OnComplete:
    """Return what does all the steps that are not None, in order; None if there are none."""
    found = [step for step in steps if step is not None]
    if not found:
        return None
    if len(found) == 1:
        return found[0]

    def run() -> None:
        for step in found:
            step()

    return run
