"""Collectives and messages of Python objects.

Every rank receives a copy that equals the object, the sending rank too; see serialize for what an object may be. All
calls block. Small objects take one round, others two and one more for each of up to 16 large arrays, and each rank
receives only the objects meant for it. A rank whose object cannot be encoded raises that error; the ranks
that expect the object raise a DistBackendError with the reason. A rank that cannot decode an object raises, and its
lists stay unchanged. After each of these errors all ranks have returned from the call, and the group can be used.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rankmesh._collectives.arguments import Timeout, check_list, communicator, group_rank_of, options, other_rank_of
from rankmesh._collectives.coalescing import is_recording
from rankmesh._collectives.object_frames import HEAD_BYTES, Incoming, Outgoing, pack, records, transfer_rests
from rankmesh._collectives.serialize import Message, dumps
from rankmesh._session.process_group import Group
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistBackendError
from rankmesh_agent.wire.object_records import OBJECTS, RECORD_TAG


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, weights_only: bool = False, *, timeout: Timeout = None
) -> None:
    """Collect every rank's ``obj`` in ``object_list`` on all ranks.

    Args:
        object_list: list with one item per rank, by group rank; all are replaced.
        obj: any object that can be pickled, between ranks that know the job's token; elsewhere None, bool, numbers,
            str, bytes, lists, tuples, dicts, sets, dates, NumPy arrays and scalars, CPU torch tensors.
        group: the group, the world by default.
        weights_only: take the objects that need no token alone, with the token too, and read no pickles.
        timeout: limit for the operation, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks outside the group get a warning, and their list is unchanged.

    Raises:
        TypeError: ``object_list`` is not a list; or an object in ``obj`` is not plain data and pickling is not allowed:
            names its position and the remedy.
        ValueError: ``object_list`` is not as long as the group; or, where pickling is not allowed, ``obj`` is nested
            deeper than 510 levels or contains itself.
        Exception: pickle's error, for an object that cannot be pickled.
        DistBackendError: a rank could not send its object; names it.
        ProtocolError: an object contains a pickle, and this rank does not read pickles.
        CollectiveMismatchError, RankFailedError, CollectiveTimeoutError: as all_reduce.
    """
    comm = communicator(group, "all_gather_object")
    if comm is None:
        return
    _one_a_rank(object_list, "object_list", comm.size)
    next_options = _rounds(comm, timeout, "all_gather_object")
    (mine,), error = pack(lambda: [dumps(obj, "obj", weights_only)], 1)
    arrived = records(comm.size)
    comm.all_gather(arrived, mine.record, next_options(False))
    incoming = [Incoming(record) for record in arrived]
    none = np.empty(0, np.uint8)
    arriving = list(itertools.zip_longest(*(each.rests for each in incoming), fillvalue=none))
    for rests, rest in itertools.zip_longest(arriving, mine.rests, fillvalue=none):
        if any(each.size for each in rests):
            comm.all_gather(list(rests), rest, next_options(False), OBJECTS)
    _raise(error)
    object_list[:] = [each.decode(comm, rank, "all_gather_object", weights_only) for rank, each in enumerate(incoming)]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Copy the objects of one rank to the lists of all ranks.

    Args:
        object_list: list of the same length on all ranks: objects as for all_gather_object on the source; on
            other ranks, items that are replaced.
        src: global rank whose objects they are; 0 by default.
        device: accepted for compatibility with torch; objects travel through host memory.
        group_src: the source's rank in the group, instead of ``src``.

    The other arguments are those of all_gather_object.

    Raises:
        ValueError: the source is given twice, or is not in the group.
        CollectiveMismatchError: the lists differ in length; on every rank, naming the lengths.
        Exception: as for all_gather_object.
    """
    comm = communicator(group, "broadcast_object_list")
    if comm is None:
        return
    root = group_rank_of(comm, src, group_src, "src", default=0)
    check_list(object_list, "object_list", None, "objects", (list,))
    count = len(object_list)
    next_options = _rounds(
        comm, timeout, f"broadcast_object_list of {count} objects from rank {comm.global_ranks[root]}"
    )
    error: Exception | None = None
    mine = Outgoing(Message(b"", [], pickled=False), count)
    if comm.rank == root:
        (mine,), error = pack(lambda: [dumps(list(object_list), "object_list", weights_only)], 1, count)
    # Every rank sends the length of its list, so that every rank can detect a mismatch; only the root sends more.
    arrived = [record if rank == root else record[:HEAD_BYTES] for rank, record in enumerate(records(comm.size))]
    comm.all_gather(arrived, mine.record if comm.rank == root else mine.record[:HEAD_BYTES], next_options(False))
    incoming = [Incoming(record) for record in arrived]
    _same_count(comm, [each.count for each in incoming], root)
    for rest in (mine if comm.rank == root else incoming[root]).rests:
        if rest.size:
            comm.broadcast(rest, root, next_options(False), OBJECTS)
    _raise(error)
    if comm.rank != root:
        object_list[:] = _decode_list(incoming[root], comm, root, count, "broadcast_object_list", weights_only)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Collect every rank's ``obj`` in ``object_gather_list`` on one rank.

    Args:
        obj: object as for all_gather_object.
        object_gather_list: on the destination, list with one item per rank, by group rank, all replaced; None
            or empty elsewhere.
        dst: global rank that gathers; 0 by default.
        group_dst: the destination's rank in the group, instead of ``dst``.

    The other arguments are those of all_gather_object.

    Raises:
        ValueError: ``object_gather_list`` is missing on the destination, is not as long as the group, or is given
            elsewhere; or the destination is given twice, or is not in the group.
        Exception: as for all_gather_object.
    """
    comm = communicator(group, "gather_object")
    if comm is None:
        return
    root = group_rank_of(comm, dst, group_dst, "dst", default=0)
    receives = comm.rank == root
    if receives:
        _one_a_rank(object_gather_list, "object_gather_list", comm.size)
    elif object_gather_list:
        raise ValueError("object_gather_list is only for the destination rank: leave it out on this one")
    next_options = _rounds(comm, timeout, "gather_object")
    (mine,), error = pack(lambda: [dumps(obj, "obj", weights_only)], 1)
    arrived = records(comm.size) if receives else []
    comm.gather(arrived, mine.record, root, next_options(False))
    incoming = [Incoming(record) for record in arrived]
    transfer_rests(comm, [] if receives else [(root, mine)], list(enumerate(incoming)), next_options)
    _raise(error)
    if receives and object_gather_list is not None:
        incoming[root].copy(mine)
        object_gather_list[:] = [
            each.decode(comm, rank, "gather_object", weights_only) for rank, each in enumerate(incoming)
        ]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Send one object from one rank to each rank's list.

    Args:
        scatter_object_output_list: list whose first item is replaced; not empty.
        scatter_object_input_list: on the source, list with one object (as for all_gather_object) per rank, by group
            rank; ignored elsewhere.
        src: global rank that scatters; 0 by default.
        group_src: the source's rank in the group, instead of ``src``.

    The other arguments are those of all_gather_object.

    Raises:
        ValueError: ``scatter_object_output_list`` is not a list, or empty; ``scatter_object_input_list`` is missing on
            the source or is not as long as the group; or the source is given twice, or is not in the group.
        Exception: as for all_gather_object.
    """
    comm = communicator(group, "scatter_object_list")
    if comm is None:
        return
    root = group_rank_of(comm, src, group_src, "src", default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("scatter_object_output_list must be a list, whose first item gets the object: pass [None]")
    next_options = _rounds(comm, timeout, "scatter_object_list")
    mine: list[Outgoing] = []
    error: Exception | None = None
    if comm.rank == root:
        objects = _one_a_rank(scatter_object_input_list, "scatter_object_input_list", comm.size)
        mine, error = pack(lambda: _encode_each(objects, "scatter_object_input_list", weights_only), comm.size)
    (arrived,) = records(1)
    comm.scatter(arrived, [each.record for each in mine], root, next_options(False))
    received = Incoming(arrived)
    transfer_rests(comm, list(enumerate(mine)), [(root, received)], next_options)
    _raise(error)
    if mine:
        received.copy(mine[root])
    scatter_object_output_list[0] = received.decode(comm, root, "scatter_object_list", weights_only)


def all_to_all_object(
    output_list: list[Any], input_list: list[Any], group: Group = None, *, timeout: Timeout = None
) -> None:
    """Send an object to every rank, and receive one from every rank. torch has no such function.

    Args:
        output_list: list with one item per rank, by group rank; item r is replaced with rank r's
            ``input_list[this group rank]``.
        input_list: list with one object (as for all_gather_object) per rank, by group rank.

    The other arguments are those of all_gather_object.

    Raises:
        ValueError: a list is not as long as the group.
        Exception: as for all_gather_object.

    Source: torch.distributed.all_to_all, for objects
    """
    comm = communicator(group, "all_to_all_object")
    if comm is None:
        return
    _one_a_rank(output_list, "output_list", comm.size)
    objects = _one_a_rank(input_list, "input_list", comm.size)
    next_options = _rounds(comm, timeout, "all_to_all_object")
    mine, error = pack(lambda: _encode_each(objects, "input_list"), comm.size)
    arrived = records(comm.size)
    comm.all_to_all(arrived, [each.record for each in mine], next_options(False))
    incoming = [Incoming(record) for record in arrived]
    transfer_rests(comm, list(enumerate(mine)), list(enumerate(incoming)), next_options)
    _raise(error)
    incoming[comm.rank].copy(mine[comm.rank])
    output_list[:] = [each.decode(comm, rank, "all_to_all_object") for rank, each in enumerate(incoming)]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Send objects to another rank, which calls recv_object_list; separate from send and recv of arrays.

    Returns when the objects may be changed again; small ones may still be in transit then.

    Args:
        object_list: list of objects as for all_gather_object.
        dst: global rank of the receiver, not this one.
        device: accepted for compatibility with torch; objects travel through host memory.
        group_dst: the receiver's rank in the group, instead of ``dst``.
        use_batch: accepted for compatibility with torch; has no effect.

    The other arguments are those of all_gather_object.

    Raises:
        TypeError: ``object_list`` is not a list; or as all_gather_object.
        ValueError: the receiver is missing, given twice, not in the group, or this rank.
        RankFailedError: the receiver died or left; names it.
        CollectiveTimeoutError: the receiver did not make the call in time; names it.
    """
    comm = communicator(group, "send_object_list")
    if comm is None:
        return
    receiver = other_rank_of(comm, dst, group_dst, "dst", "objects")
    check_list(object_list, "object_list", None, "objects", (list,))
    next_options = _rounds(comm, timeout, "send_object_list")
    mine = Outgoing(dumps(list(object_list), "object_list", weights_only), len(object_list))
    comm.send(mine.record, comm.ranks[receiver], RECORD_TAG, next_options(False))
    transfer_rests(comm, [(receiver, mine)], [], next_options)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    timeout: Timeout = None,
) -> int:
    """Receive what another rank sends with send_object_list.

    Args:
        object_list: list as long as the sender's, whose items are replaced.
        src: global rank of the sender; any rank of the group by default.
        device: accepted for compatibility with torch; objects travel through host memory.
        group_src: the sender's rank in the group, instead of ``src``.
        use_batch: accepted for compatibility with torch; has no effect.

    The other arguments are those of all_gather_object.

    Returns:
        The sender's global rank; -1, with a warning, if this rank is not in the group.

    Raises:
        TypeError: ``object_list`` is not a list.
        ValueError: the sender is given twice, not in the group, or this rank, or there is no other rank.
        DistBackendError: the sender's list has another length; the message is lost.
        ProtocolError: an object contains a pickle, and this rank does not read pickles.
        RankFailedError: the sender died or left; names it.
        CollectiveTimeoutError: nothing was sent in time; names the expected sender.
    """
    comm = communicator(group, "recv_object_list")
    if comm is None:
        return -1
    source = ANY
    if src is not None or group_src is not None:
        source = comm.ranks[other_rank_of(comm, src, group_src, "src", "objects")]
    elif comm.size == 1:
        raise ValueError("the group has no other rank to receive from")
    check_list(object_list, "object_list", None, "objects", (list,))
    next_options = _rounds(comm, timeout, "recv_object_list")
    (arrived,) = records(1)
    sender = comm.receive(arrived, source, RECORD_TAG, next_options(False))
    assert isinstance(sender, int)
    rank = comm.global_ranks.index(sender)
    received = Incoming(arrived)
    transfer_rests(comm, [], [(rank, received)], next_options)
    object_list[:] = _decode_list(received, comm, rank, len(object_list), "recv_object_list", weights_only)
    return sender


# Arguments


def _one_a_rank(objects: Any, name: str, size: int) -> Any:
    if objects is None:
        raise ValueError(f"{name} is missing: give a list of {size} items, one a rank")
    return check_list(objects, name, size, "items", (list,))


# Steps


def _rounds(comm: Communicator, timeout: Timeout, description: str) -> Callable[[bool], Options]:
    """Return a function that returns the options of each call of an operation; they share its timeout."""
    if is_recording(comm):
        raise RuntimeError("objects cannot be sent in a batch of collectives: make the call before or after it")
    first = options(comm, timeout, False, [], details=lambda: description)
    end = time.monotonic() + first.timeout

    def next_options(async_op: bool) -> Options:
        return first._replace(timeout=max(0.0, end - time.monotonic()), async_op=async_op)

    return next_options


def _encode_each(objects: list[Any], name: str, weights_only: bool = False) -> list[Message]:
    return [dumps(obj, f"{name}[{number}]", weights_only) for number, obj in enumerate(objects)]


def _raise(error: Exception | None) -> None:
    """Raise the error that kept this rank from sending its object, once the others have received it."""
    if error is not None:
        raise error


def _same_count(comm: Communicator, counts: list[int], root: int) -> None:
    if any(count != counts[root] for count in counts):
        lengths = ", ".join(f"{count} on rank {rank}" for rank, count in zip(comm.global_ranks, counts, strict=True))
        raise CollectiveMismatchError(
            f"broadcast_object_list needs lists of the same length on all ranks, and they have {lengths}. No list was "
            "changed",
            ranks=[rank for rank, count in zip(comm.global_ranks, counts, strict=True) if count != counts[root]],
            op="broadcast_object_list",
            group=comm.name,
        )


def _decode_list(
    received: Incoming, comm: Communicator, rank: int, count: int, called: str, weights_only: bool
) -> list[Any]:
    objects = received.decode(comm, rank, called, weights_only)
    if not isinstance(objects, list) or len(objects) != count:
        number = comm.global_ranks[rank]
        raise DistBackendError(
            f"{called}: rank {number} sent {received.count} objects, but object_list has {count} items: the lists must "
            "have the same length on both sides",
            op=called,
            group=comm.name,
        )
    return objects
