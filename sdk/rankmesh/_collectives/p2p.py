"""Point-to-point messages: send, recv, isend, irecv and batches of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rankmesh._collectives.arguments import Timeout, communicator, group_rank_of, options
from rankmesh._session.process_group import Group
from rankmesh._session.ranks import as_int, require_member
from rankmesh._session.session import require_session
from rankmesh._tensors.buffers import device_of, flat_in, flat_out
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.progress.message_queues import ANY


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

    A large message has a matching receive then. A small one (up to RANKMESH_EAGER_BYTES) may still be in transit: if
    its receive turns out to have another size or dtype, the receive raises, and the group ends. The next call of every
    rank in the group raises a GroupAbortedError with sizes, dtypes and both ranks.

    Args:
        tensor: array.
        dst: global rank of the receiver; this rank itself if it has begun the matching irecv.
        group: a group both are in, the world by default.
        tag: matches the receive with the same tag.
        group_dst: the receiver's rank in the group, instead of ``dst``.
        timeout: limit for the message, timedelta or seconds; the group's by default.

    Raises:
        TypeError: ``tensor`` is not an array that can be communicated.
        ValueError: the receiver is missing, given twice, not in the group, or this rank without a matching irecv; or
            this rank is not in the group.
        DistBackendError: the receive has another size or dtype.
        RankFailedError: the receiver died or left; names it.
        CollectiveTimeoutError: the receiver did not make the call in time; names it.
    """
    comm = require_member(group)._communicator  # a ValueError, as in torch: a message that is lost is an error
    plain = timeout is None and group_dst is None
    if plain and comm.message_at_once and comm.message_at_once(True, tensor, dst, tag):
        return
    _begin_send(comm, group, tensor, dst, tag, group_dst, timeout, async_op=False)()


def isend(
    tensor: Any, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Begin to send ``tensor``; it must not change before the Work's ``wait()`` returns.

    A message to this rank itself needs its irecv begun, before or after it, before either Work is waited for.

    The other arguments and errors are those of send; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work; None, with a warning, if this rank is not in the group.
    """
    comm = communicator(group, "isend")
    return None if comm is None else _begin_send(comm, group, tensor, dst, tag, group_dst, None, async_op=True)()


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
        src: global rank of the sender; any rank of the group if None; this rank itself if it has begun the matching
            isend.
        group: a group both are in, the world by default.
        tag: take only a message sent with this tag.
        group_src: the sender's rank in the group, instead of ``src``.
        timeout: limit for the message, timedelta or seconds; the group's by default.

    Returns:
        The sender's global rank; -1, with a warning, if this rank is not in the group.

    Raises:
        TypeError: ``tensor`` is not an array that can be communicated.
        ValueError: the sender is given twice, not in the group, or this rank without a matching isend; or ``tensor`` is
            read-only.
        DistBackendError: the message has another size or dtype; ``tensor`` is unchanged, and the sender gets the error,
            too. The send of a small message has returned before: the group ends then.
        RankFailedError: the sender died or left; names it.
        CollectiveTimeoutError: nothing was sent in time; names the expected sender.
    """
    comm = communicator(group, "recv")
    if comm is None:
        return -1
    plain = timeout is None and group_src is None
    if plain and comm.message_at_once and comm.message_at_once(False, tensor, src, tag):
        return cast(int, src)
    begin = _begin_recv(comm, group, tensor, src, tag, group_src, timeout, async_op=False)
    return begin()  # type: ignore[return-value]  # an int, as it is synchronous


def irecv(
    tensor: Any, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Begin to receive into ``tensor``; it must not be used before the Work's ``wait()`` returns.

    A message from this rank itself needs its isend begun, before or after it, before either Work is waited for.

    The other arguments and errors are those of recv; errors of the transfer are raised by ``wait()``.

    Returns:
        A Work, whose ``source_rank()`` is the sender; None, with a warning, if this rank is not in the group.
    """
    comm = communicator(group, "irecv")
    if comm is None:
        return None
    return cast(Work, _begin_recv(comm, group, tensor, src, tag, group_src, None, async_op=True)())


class P2POp:
    """One message of a batch; see batch_isend_irecv.

    Args:
        op: ``isend`` or ``irecv``.
        tensor: array to send, or to receive into.
        peer: global rank of the receiver or sender.
        group: a group both are in, the world by default.
        tag: as for send and recv.
        group_peer: the peer's rank in the group, instead of ``peer``.

    Raises:
        ValueError: ``op`` is neither of them; or the peer is missing, given twice, or not in the group.
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
        comm = communicator(group, "P2POp")
        if comm is not None:
            group_peer = group_rank_of(comm, peer, group_peer, "peer")
            peer = comm.global_ranks[group_peer]
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = require_session().group if group is None else group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin several messages at once.

    Args:
        p2p_op_list: the messages, begun in this order; the arrays must not be used before they are complete.

    Returns:
        The Works, in the same order; none for groups that this rank is not in.

    Raises:
        ValueError: the list is empty, or its messages are of several groups.
        TypeError: an item is not a P2POp.
        Exception: as for isend and irecv.
    """
    if not isinstance(p2p_op_list, list | tuple) or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise TypeError("p2p_op_list must be a list of P2POp")
    if not p2p_op_list:
        raise ValueError("p2p_op_list is empty")
    if any(one.group is not p2p_op_list[0].group for one in p2p_op_list):
        raise ValueError("all messages of a batch must be of the same group")
    comm = communicator(p2p_op_list[0].group, "batch_isend_irecv")
    if comm is None:
        return []
    me = comm.rank
    for one in sorted(p2p_op_list, key=lambda one: sorted((me, me if one.group_peer is None else one.group_peer))):
        _communicator_for(comm, one.group, one.tensor, one.group_peer)  # pairs of ranks meet, in the same order at all
    messages = [  # all are checked before the first is sent
        (_begin_send if one.op is isend else _begin_recv)(
            comm, one.group, one.tensor, None, one.tag, one.group_peer, None, async_op=True
        )
        for one in p2p_op_list
    ]
    with contextlib.ExitStack() as batches:
        for each in {_communicator_for(comm, one.group, one.tensor, one.group_peer) for one in p2p_op_list}:
            batches.enter_context(each.batch_messages())
        return [cast(Work, begin()) for begin in messages]


def _begin_send(
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
    """Check a message to be sent; return the function that begins it."""
    peer = group_rank_of(comm, dst, group_dst, "dst")
    rank = comm.ranks[peer]
    tag = _check_tag(tag)
    if type(tensor) is not np.ndarray:
        comm = _communicator_for(comm, group, tensor, peer)
    array = flat_in(tensor, "tensor", comm)
    return functools.partial(comm.send, array, rank, tag, options(comm, timeout, async_op, [tensor]))


def _begin_recv(
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
    """Check a message to be received; return the function that begins it."""
    rank, peer = ANY, None
    if src is not None or group_src is not None:
        peer = group_rank_of(comm, src, group_src, "src")
        rank = comm.ranks[peer]
    tag = _check_tag(tag)
    if type(tensor) is not np.ndarray:
        comm = _communicator_for(comm, group, tensor, peer)
    array, write_back = flat_out(tensor, "tensor", comm)
    given = options(comm, timeout, async_op, [tensor], write_back)
    return functools.partial(comm.receive, array, rank, tag, given)


def _communicator_for(comm: Communicator, group: Group, tensor: Any, peer: int | None) -> Communicator:
    """Return the communicator for messages of an array to or from a group rank (None: any)."""
    device = device_of(tensor)
    if device is None:
        return comm
    from rankmesh._session import gpu

    return gpu.for_messages(group, device, peer)


def _check_tag(tag: int) -> int:
    if type(tag) is not int:
        tag = as_int(tag, "tag")
    if not -(1 << 63) <= tag < 1 << 63:
        raise ValueError(f"tag must be a whole number of 64 bits, got {tag!r}")
    return tag
