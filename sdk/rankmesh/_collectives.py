"""The collectives of torch.distributed, over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rankmesh._arrays import destination, source
from rankmesh._world import Group, _NonMember, communicator
from rankmesh_agent.collectives.reduce import refuse
from rankmesh_agent.engine.work import Work
from rankmesh_agent.wire.deadline import seconds_of
from rankmesh_agent.wire.ops import ReduceOp


def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place: afterwards it is the same, bit for bit, everywhere.

    Elements are reduced in rank order, whatever the transport; float16 is accumulated in float32.

    Args:
        tensor: NumPy array of any shape, the same number of elements and dtype on all ranks; integers, floats, complex
            (SUM and PRODUCT) or bool. Non-contiguous arrays work (through a copy).
        op: ReduceOp.SUM, PRODUCT, MIN or MAX.
        group: the group, the world by default.
        async_op: return at once; ``tensor`` must not be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also at ranks that are not in the group.

    Raises:
        TypeError, ValueError: ``tensor`` is no array of such a dtype, or read-only.
        CollectiveMismatchError: the ranks did not make the same call.
        RankFailedError: a rank died or left; names it.
        CollectiveTimeoutError: a rank did not come in time; names it.
        DistBackendError: the group failed earlier; it is the first failure once more.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_reduce
    """
    if isinstance(group, _NonMember):
        return None
    members = communicator(group)
    array, after = destination(tensor, "tensor")
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a rankmesh.ReduceOp, got {op!r}")
    if array.dtype.kind == "c":
        refuse(op, array.dtype)
    limit = members.timeout if timeout is None else seconds_of(timeout, members.timeout)
    return members.all_reduce(array, op, limit, async_op, [tensor], after)


def broadcast(
    tensor: Any,
    src: int,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Copy ``tensor`` of rank ``src`` to all ranks.

    Args:
        tensor: NumPy array, the same number of elements and dtype on all ranks; read on ``src``, written elsewhere.
        src: global rank whose data is copied.
        group: the group, the world by default.
        async_op: return at once; ``tensor`` must not be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also at ranks that are not in the group.

    Raises:
        ValueError: ``src`` is not in the group.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.broadcast
    """
    if isinstance(group, _NonMember):
        return None
    members = communicator(group)
    root = member_rank(members.ranks, src, "src")
    if members.rank == root:
        array, after = source(tensor, "tensor"), None
    else:
        array, after = destination(tensor, "tensor")
    limit = members.timeout if timeout is None else seconds_of(timeout, members.timeout)
    return members.broadcast(array, root, limit, async_op, [tensor], after)


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Copy every rank's ``tensor`` into ``tensor_list`` on all ranks.

    Args:
        tensor_list: one NumPy array a rank, by group rank, each with as many elements as ``tensor`` and its dtype.
        tensor: NumPy array, the same number of elements and dtype on all ranks.
        group: the group, the world by default.
        async_op: return at once; no array must be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also at ranks that are not in the group.

    Raises:
        ValueError: ``tensor_list`` has another length than the group, or an array of another size or dtype.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_gather
    """
    if isinstance(group, _NonMember):
        return None
    members = communicator(group)
    array = source(tensor, "tensor")
    if len(tensor_list) != members.size:
        raise ValueError(f"tensor_list has {len(tensor_list)} arrays, but the group has {members.size} ranks")
    outputs, copies = [], []
    for number, output in enumerate(tensor_list):
        flat, copy = destination(output, f"tensor_list[{number}]")
        if flat.size != array.size or flat.dtype != array.dtype:
            raise ValueError(
                f"tensor_list[{number}] is {flat.dtype}[{flat.size}], but tensor is {array.dtype}[{array.size}]: "
                "all must have the same dtype and number of elements"
            )
        outputs.append(flat)
        if copy is not None:
            copies.append(copy)
    limit = members.timeout if timeout is None else seconds_of(timeout, members.timeout)
    return members.all_gather(outputs, array, limit, async_op, list(tensor_list), _all_of(copies))


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    *,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until all ranks of the group have come here.

    Args:
        group: the group, the world by default.
        async_op: return at once; the Work's ``wait()`` waits.
        device_ids: accepted for torch's sake; there is no device to guess.
        timeout: how long to wait, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also at ranks that are not in the group.

    Raises:
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.barrier
    """
    if isinstance(group, _NonMember):
        return None
    members = communicator(group)
    return members.barrier(members.timeout if timeout is None else seconds_of(timeout, members.timeout), async_op)


def member_rank(ranks: Sequence[int], rank: int, name: str) -> int:
    """Return the group rank of a global rank.

    Raises:
        ValueError: it is not a member.
    """
    if rank not in ranks:
        raise ValueError(f"{name}={rank!r} is not in the group, whose ranks are {list(ranks)}")
    return ranks.index(rank)


def _all_of(copies: list[Callable[[], None]]) -> Callable[[], None] | None:
    if not copies:
        return None

    def run() -> None:
        for copy in copies:
            copy()

    return run
