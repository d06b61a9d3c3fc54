"""Point-to-point messages of torch.distributed, over NumPy arrays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from rankmesh._arrays import destination, source
from rankmesh._collectives import member_rank
from rankmesh._world import Group, _NonMember, communicator
from rankmesh_agent.engine.communicator import Communicator
from rankmesh_agent.engine.p2p import ANY
from rankmesh_agent.engine.work import Work
from rankmesh_agent.wire.deadline import seconds_of


def send(tensor: Any, dst: int, group: Group = None, tag: int = 0, *, timeout: timedelta | float | None = None) -> None:
    """Send ``tensor`` to rank ``dst``; returns when ``tensor`` may be changed again.

    A small message may still be on its way then; a large one has been asked for by its receiver.

    Args:
        tensor: NumPy array.
        dst: global rank of the receiver, not this one.
        group: a group both are in, the world by default.
        tag: which receive it is for: the receive with the same tag.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Raises:
        ValueError: ``dst`` is not in the group, or is this rank.
        DistBackendError: the receive has another size or dtype (large messages).
        RankFailedError: the receiver died or left; names it.
        CollectiveTimeoutError: it did not receive in time; names it.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.send
    """
    _send(tensor, dst, group, tag, timeout, async_op=False)


def isend(tensor: Any, dst: int, group: Group = None, tag: int = 0) -> Work | None:
    """Begin to send ``tensor`` to rank ``dst``; it must not change before the Work's ``wait()`` returns.

    Arguments and errors are those of send; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work; None if this rank is not in the group.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.isend
    """
    return _send(tensor, dst, group, tag, None, async_op=True)


def recv(
    tensor: Any, src: int | None = None, group: Group = None, tag: int = 0, *, timeout: timedelta | float | None = None
) -> int:
    """Receive into ``tensor``.

    Args:
        tensor: NumPy array with the message's dtype and number of elements.
        src: global rank of the sender; any rank of the group if None.
        group: a group both are in, the world by default.
        tag: take only a message sent with this tag.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Returns:
        The sender's global rank; -1 if this rank is not in the group.

    Raises:
        ValueError: ``src`` is not in the group, or is this rank; or ``tensor`` is read-only.
        DistBackendError: the message has another size or dtype; ``tensor`` is unchanged, the message is gone.
        RankFailedError: the sender died or left; names it.
        CollectiveTimeoutError: nothing was sent in time; names who should have.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.recv
    """
    if isinstance(group, _NonMember):
        return -1
    return cast(int, _recv(tensor, src, group, tag, timeout, async_op=False))


def irecv(tensor: Any, src: int | None = None, group: Group = None, tag: int = 0) -> Work | None:
    """Begin to receive into ``tensor``; it must not be touched before the Work's ``wait()`` returns.

    Arguments and errors are those of recv; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work, whose ``source_rank()`` is the sender; None if this rank is not in the group.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.irecv
    """
    if isinstance(group, _NonMember):
        return None
    return cast(Work, _recv(tensor, src, group, tag, None, async_op=True))


def _send(
    tensor: Any, dst: int, group: Group, tag: int, timeout: timedelta | float | None, *, async_op: bool
) -> Work | None:
    if isinstance(group, _NonMember):
        return None
    members = communicator(group)
    _check(members, dst, tag, "dst")
    array = source(tensor, "tensor")
    return members.send(array, dst, tag, seconds_of(timeout, members.timeout), async_op, [tensor])


def _recv(
    tensor: Any,
    src: int | None,
    group: Any,
    tag: int,
    timeout: timedelta | float | None,
    *,
    async_op: bool,
) -> Work | int:
    members = communicator(group)
    if src is not None:
        _check(members, src, tag, "src")
    else:
        _check_tag(tag)
    array, after = destination(tensor, "tensor")
    limit = seconds_of(timeout, members.timeout)
    return members.receive(array, ANY if src is None else src, tag, limit, async_op, [tensor], after)


def _check(members: Communicator, rank: int, tag: int, name: str) -> None:
    member_rank(members.ranks, rank, name)
    if rank == members.mesh.rank:
        raise ValueError(f"{name}={rank} is this rank: a process does not send to itself, copy the array instead")
    _check_tag(tag)


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not -(1 << 63) <= tag < 1 << 63:
        raise ValueError(f"tag must be a whole number of 64 bits, got {tag!r}")
