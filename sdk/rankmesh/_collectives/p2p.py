"""Point-to-point messages of torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rankmesh._collectives.arguments import Timeout, group_root, members_of, options, whole
from rankmesh._session.session import Group, require_world
from rankmesh._tensors.arrays import destination, source
from rankmesh._tensors.containers import device_of
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.progress.matching import ANY


def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Send ``tensor`` to another rank; returns when ``tensor`` may be changed again.

    A small message may still be on its way then; a large one has been asked for by its receiver.

    Args:
        tensor: array.
        dst: global rank of the receiver, not this one.
        group: a group both are in, the world by default.
        tag: which receive it is for: the receive with the same tag.
        group_dst: the receiver's rank in the group, instead of ``dst``.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Raises:
        TypeError: ``tensor`` is no array that can be communicated.
        ValueError: the receiver is missing, given twice, not in the group, or this rank.
        DistBackendError: the receive has another size or dtype; or that of an earlier small message had.
        RankFailedError: the receiver died or left; names it.
        CollectiveTimeoutError: it did not receive in time; names it.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.send
    """
    comm = members_of(group, "send")
    if comm is not None:
        _sending(comm, group, tensor, dst, tag, group_dst, timeout, async_op=False)()


def isend(
    tensor: Any, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Begin to send ``tensor`` to another rank; it must not change before the Work's ``wait()`` returns.

    Arguments and errors are those of send; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work; None, with a warning, if this rank is not in the group.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.isend
    """
    comm = members_of(group, "isend")
    return None if comm is None else _sending(comm, group, tensor, dst, tag, group_dst, None, async_op=True)()


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> int:
    """Receive into ``tensor``.

    Args:
        tensor: array with the message's dtype and number of elements.
        src: global rank of the sender; any rank of the group if None.
        group: a group both are in, the world by default.
        tag: take only a message sent with this tag.
        group_src: the sender's rank in the group, instead of ``src``.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Returns:
        The sender's global rank; -1, with a warning, if this rank is not in the group.

    Raises:
        TypeError: ``tensor`` is no array that can be communicated.
        ValueError: the sender is given twice, not in the group, or this rank; or ``tensor`` is read-only.
        DistBackendError: the message has another size or dtype; ``tensor`` is unchanged, the message is gone, and the
            sender is told.
        RankFailedError: the sender died or left; names it.
        CollectiveTimeoutError: nothing was sent in time; names who should have.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.recv
    """
    comm = members_of(group, "recv")
    if comm is None:
        return -1
    return cast(int, _receiving(comm, group, tensor, src, tag, group_src, timeout, async_op=False)())


def irecv(
    tensor: Any, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Begin to receive into ``tensor``; it must not be touched before the Work's ``wait()`` returns.

    Arguments and errors are those of recv; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work, whose ``source_rank()`` is the sender; None, with a warning, if this rank is not in the group.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.irecv
    """
    comm = members_of(group, "irecv")
    if comm is None:
        return None
    return cast(Work, _receiving(comm, group, tensor, src, tag, group_src, None, async_op=True)())


class P2POp:
    """One message of a batch; see batch_isend_irecv.

    Args:
        op: ``isend`` or ``irecv``.
        tensor: what is sent, or received into.
        peer: global rank at the other end.
        group: a group both are in, the world by default.
        tag: as for send and recv.
        group_peer: the peer's rank in the group, instead of ``peer``.

    Raises:
        ValueError: ``op`` is neither; or the peer is missing, given twice, or not in the group.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.P2POp
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Any,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"op must be rankmesh.isend or rankmesh.irecv, got {op!r}")
        comm = members_of(group, "P2POp")
        if comm is not None:
            group_peer = group_root(comm, peer, group_peer, "peer")
            peer = comm.global_ranks[group_peer]
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = require_world().group if group is None else group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin several messages at once.

    Args:
        p2p_op_list: the messages, begun in this order; the arrays must not be touched before they are complete.

    Returns:
        The Works, in the same order; none for groups that this rank is not in.

    Raises:
        ValueError: the list is empty, or its messages are of several groups.
        TypeError: something in it is no P2POp.
        As isend and irecv.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.batch_isend_irecv
    """
    if not isinstance(p2p_op_list, list | tuple) or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise TypeError("p2p_op_list must be a list of P2POp")
    if not p2p_op_list:
        raise ValueError("p2p_op_list is empty")
    if any(one.group is not p2p_op_list[0].group for one in p2p_op_list):
        raise ValueError("all messages of a batch must be of the same group")
    comm = members_of(p2p_op_list[0].group, "batch_isend_irecv")
    if comm is None:
        return []
    messages = [  # all are checked before the first is sent
        (_sending if one.op is isend else _receiving)(
            comm, one.group, one.tensor, None, one.tag, one.group_peer, None, async_op=True
        )
        for one in p2p_op_list
    ]
    with contextlib.ExitStack() as together:
        for carrier in {_carrying(comm, one.group, one.tensor, one.group_peer) for one in p2p_op_list}:
            together.enter_context(carrier.batch_messages())
        return [cast(Work, begin()) for begin in messages]


def _sending(
    comm: Communicator,
    group: Group,
    tensor: Any,
    dst: int | None,
    tag: int,
    group_dst: int | None,
    timeout: Timeout,
    *,
    async_op: bool,
) -> Callable[[], Work | None]:
    """Check a message that is to be sent; return what begins it."""
    peer = group_root(comm, dst, group_dst, "dst")
    rank = _peer(comm, peer, "dst")
    tag = _checked_tag(tag)
    comm = _carrying(comm, group, tensor, peer)
    array = source(tensor, "tensor", comm)
    how = options(comm, timeout, async_op, [tensor])
    return lambda: comm.send(array, rank, tag, how)


def _receiving(
    comm: Communicator,
    group: Group,
    tensor: Any,
    src: int | None,
    tag: int,
    group_src: int | None,
    timeout: Timeout,
    *,
    async_op: bool,
) -> Callable[[], Work | int]:
    """Check a message that is to be received; return what begins it."""
    rank, peer = ANY, None
    if src is not None or group_src is not None:
        peer = group_root(comm, src, group_src, "src")
        rank = _peer(comm, peer, "src")
    tag = _checked_tag(tag)
    comm = _carrying(comm, group, tensor, peer)
    array, after = destination(tensor, "tensor", comm)
    how = options(comm, timeout, async_op, [tensor], after)
    return lambda: comm.receive(array, rank, tag, how)


def _carrying(comm: Communicator, group: Group, tensor: Any, peer: int | None) -> Communicator:
    """Return who carries an array to or from a group rank, None for any; of one on a GPU perhaps not ``comm``."""
    device = None if type(tensor) is np.ndarray else device_of(tensor)
    if device is None:
        return comm
    from rankmesh._tensors import cuda

    return cuda.messages(group, device, peer)


def _peer(comm: Communicator, group_rank: int, name: str) -> int:
    """Return the mesh's number of a rank that is to be another one."""
    if group_rank == comm.rank:
        raise ValueError(f"{name} is this rank: a process does not send to itself, copy the array instead")
    return comm.ranks[group_rank]


def _checked_tag(tag: int) -> int:
    tag = whole(tag, "tag")
    if not -(1 << 63) <= tag < 1 << 63:
        raise ValueError(f"tag must be a whole number of 64 bits, got {tag!r}")
    return tag
