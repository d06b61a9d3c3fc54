"""Collectives and messages of Python objects.

An object arrives as an equal one, also at the rank that sent it. Plain data, NumPy arrays and torch tensors are encoded
without pickle; see _serialize for the rest. All calls block. Small objects take one round, others two, and only what a
rank is to get is sent to it. A rank whose object cannot be encoded raises that error; ranks that were to get it are
told why, with a DistBackendError. Where objects cannot be read, that rank raises and its lists stay as they were. In
each of these cases all ranks have come out of the call, and the group goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rankmesh._collectives.arguments import Timeout, group_root, listed, members_of, options
from rankmesh._collectives.object_frames import HEAD_BYTES, RECORD_TAG, Incoming, Outgoing, move_rests, pack, records
from rankmesh._collectives.serialize import dumps
from rankmesh._session.session import Group
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.progress.matching import ANY
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistBackendError


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None, *, timeout: Timeout = None) -> None:
    """Put every rank's ``obj`` into ``object_list`` on all ranks.

    Args:
        object_list: list with one item a rank, which are replaced, by group rank.
        obj: any object: None, bool, numbers, str, bytes, lists, tuples, dicts, sets, dates, NumPy arrays and scalars,
            CPU torch tensors; others (see the error) are pickled between ranks that know the job's token.
        group: the group, the world by default.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned, and their list stays as it is.

    Raises:
        TypeError: ``object_list`` is no list; or something in ``obj`` is not plain data and must not, or cannot, be
            pickled: says where it is and what to do.
        ValueError: ``object_list`` has another length than the group; or ``obj`` contains itself, or is nested deeper
            than 100 levels.
        DistBackendError: a rank could not send its object; names it.
        ProtocolError: an object has a pickle in it, and pickles are not read here.
        CollectiveMismatchError, RankFailedError, CollectiveTimeoutError: as all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_gather_object
    """
    comm = members_of(group, "all_gather_object")
    if comm is None:
        return
    _one_a_rank(object_list, "object_list", comm.size)
    how = _rounds(comm, timeout, "all_gather_object")
    (mine,), error = pack(lambda: [dumps(obj, "obj")], 1)
    arrived = records(comm.size)
    comm.all_gather(arrived, mine.record, how(False))
    parcels = [Incoming(record) for record in arrived]
    if any(parcel.rest.size for parcel in parcels):
        comm.all_gather([parcel.rest for parcel in parcels], mine.rest, how(False))
    _raise(error)
    object_list[:] = [parcel.open(comm, rank, "all_gather_object") for rank, parcel in enumerate(parcels)]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Put the objects of one rank into the lists of all ranks.

    Args:
        object_list: list of the same length on all ranks: objects as for all_gather_object on the source, where they
            stay; elsewhere its items are replaced.
        src: global rank whose objects they are; 0 by default.
        group: the group, the world by default.
        device: None or a CPU device.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned, and their list stays as it is.

    Raises:
        ValueError: the source is given twice, or is not in the group; or ``device`` is no CPU.
        CollectiveMismatchError: the lists differ in length; on every rank, naming the lengths.
        As all_gather_object.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.broadcast_object_list
    """
    comm = members_of(group, "broadcast_object_list")
    if comm is None:
        return
    root = group_root(comm, src, group_src, "src", default=0)
    listed(object_list, "object_list", None, "objects", (list,))
    _check_device(device)
    count = len(object_list)
    how = _rounds(comm, timeout, f"broadcast_object_list of {count} objects from rank {comm.global_ranks[root]}")
    error: Exception | None = None
    mine = Outgoing(b"", count)
    if comm.rank == root:
        (mine,), error = pack(lambda: [dumps(list(object_list), "object_list")], 1, count)
    # All tell the length of their list, so that all can be told of a wrong one; only the root has more to say.
    arrived = [record if rank == root else record[:HEAD_BYTES] for rank, record in enumerate(records(comm.size))]
    comm.all_gather(arrived, mine.record if comm.rank == root else mine.record[:HEAD_BYTES], how(False))
    parcels = [Incoming(record) for record in arrived]
    _same_count(comm, [parcel.count for parcel in parcels], root)
    if parcels[root].rest.size:
        comm.broadcast(mine.rest if comm.rank == root else parcels[root].rest, root, how(False))
    _raise(error)
    if comm.rank != root:
        object_list[:] = _opened_list(parcels[root], comm, root, count, "broadcast_object_list")


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Put every rank's ``obj`` into ``object_gather_list`` on one rank.

    Args:
        obj: object as for all_gather_object.
        object_gather_list: on the destination, list with one item a rank, which are replaced, by group rank; None or
            empty elsewhere.
        dst: global rank that gathers; 0 by default.
        group: the group, the world by default.
        group_dst: the destination's rank in the group, instead of ``dst``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned.

    Raises:
        ValueError: ``object_gather_list`` is missing on the destination, has another length than the group, or is given
            elsewhere; or the destination is given twice, or is not in the group.
        As all_gather_object.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.gather_object
    """
    comm = members_of(group, "gather_object")
    if comm is None:
        return
    root = group_root(comm, dst, group_dst, "dst", default=0)
    receives = comm.rank == root
    if receives:
        _one_a_rank(object_gather_list, "object_gather_list", comm.size)
    elif object_gather_list:
        raise ValueError("object_gather_list is only for the destination rank: leave it out on this one")
    how = _rounds(comm, timeout, "gather_object")
    (mine,), error = pack(lambda: [dumps(obj, "obj")], 1)
    arrived = records(comm.size) if receives else []
    comm.gather(arrived, mine.record, root, how(False))
    parcels = [Incoming(record) for record in arrived]
    move_rests(comm, [] if receives else [(root, mine)], list(enumerate(parcels)), how)
    _raise(error)
    if receives and object_gather_list is not None:
        parcels[root].rest[:] = mine.rest
        object_gather_list[:] = [parcel.open(comm, rank, "gather_object") for rank, parcel in enumerate(parcels)]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Put each rank's own one of the objects that one rank has into its list.

    Args:
        scatter_object_output_list: list whose first item is replaced; not empty.
        scatter_object_input_list: on the source, list with one object (as for all_gather_object) a rank, by group rank;
            not looked at elsewhere.
        src: global rank that scatters; 0 by default.
        group: the group, the world by default.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned, and their list stays as it is.

    Raises:
        ValueError: ``scatter_object_output_list`` is no list, or empty; ``scatter_object_input_list`` is missing on the
            source or has another length than the group; or the source is given twice, or is not in the group.
        As all_gather_object.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.scatter_object_list
    """
    comm = members_of(group, "scatter_object_list")
    if comm is None:
        return
    root = group_root(comm, src, group_src, "src", default=0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("scatter_object_output_list must be a list, whose first item gets the object: pass [None]")
    how = _rounds(comm, timeout, "scatter_object_list")
    mine: list[Outgoing] = []
    error: Exception | None = None
    if comm.rank == root:
        objects = _one_a_rank(scatter_object_input_list, "scatter_object_input_list", comm.size)
        mine, error = pack(lambda: _each(objects, "scatter_object_input_list"), comm.size)
    (arrived,) = records(1)
    comm.scatter(arrived, [parcel.record for parcel in mine], root, how(False))
    parcel = Incoming(arrived)
    move_rests(comm, list(enumerate(mine)), [(root, parcel)], how)
    _raise(error)
    if mine:
        parcel.rest[:] = mine[root].rest
    scatter_object_output_list[0] = parcel.open(comm, root, "scatter_object_list")


def all_to_all_object(
    output_list: list[Any], input_list: list[Any], group: Group = None, *, timeout: Timeout = None
) -> None:
    """Give every rank an object, and get one from every rank. torch has no such function.

    Args:
        output_list: list with one item a rank, which are replaced, by group rank: ``input_list[this group rank]`` of
            each.
        input_list: list with one object (as for all_gather_object) a rank, by group rank.
        group: the group, the world by default.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned, and their list stays as it is.

    Raises:
        ValueError: a list has another length than the group.
        As all_gather_object.

    Source: torch.distributed.all_to_all, for objects
    """
    comm = members_of(group, "all_to_all_object")
    if comm is None:
        return
    _one_a_rank(output_list, "output_list", comm.size)
    objects = _one_a_rank(input_list, "input_list", comm.size)
    how = _rounds(comm, timeout, "all_to_all_object")
    mine, error = pack(lambda: _each(objects, "input_list"), comm.size)
    arrived = records(comm.size)
    comm.all_to_all(arrived, [parcel.record for parcel in mine], how(False))
    parcels = [Incoming(record) for record in arrived]
    move_rests(comm, list(enumerate(mine)), list(enumerate(parcels)), how)
    _raise(error)
    parcels[comm.rank].rest[:] = mine[comm.rank].rest
    output_list[:] = [parcel.open(comm, rank, "all_to_all_object") for rank, parcel in enumerate(parcels)]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout = None,
) -> None:
    """Send objects to another rank, which calls recv_object_list; does not meet send and recv of arrays.

    Returns when the objects may be changed again: small ones may still be on their way then.

    Args:
        object_list: list of objects as for all_gather_object.
        dst: global rank of the receiver, not this one.
        group: a group both are in, the world by default.
        device: None or a CPU device.
        group_dst: the receiver's rank in the group, instead of ``dst``.
        use_batch: accepted for torch's sake; makes no difference.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Returns:
        None. Ranks that are not in the group are warned.

    Raises:
        TypeError: ``object_list`` is no list; or as all_gather_object.
        ValueError: the receiver is missing, given twice, not in the group, or this rank; or ``device`` is no CPU.
        RankFailedError: the receiver died or left; names it.
        CollectiveTimeoutError: it did not receive in time; names it.

    Source: torch.distributed.send_object_list
    """
    comm = members_of(group, "send_object_list")
    if comm is None:
        return
    to = _other(comm, group_root(comm, dst, group_dst, "dst"), "dst")
    listed(object_list, "object_list", None, "objects", (list,))
    _check_device(device)
    how = _rounds(comm, timeout, "send_object_list")
    mine = Outgoing(dumps(list(object_list), "object_list"), len(object_list))
    comm.send(mine.record, comm.ranks[to], RECORD_TAG, how(False))
    move_rests(comm, [(to, mine)], [], how)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout = None,
) -> int:
    """Receive what another rank sends with send_object_list.

    Args:
        object_list: list as long as the sender's, whose items are replaced.
        src: global rank of the sender; any rank of the group by default.
        group: a group both are in, the world by default.
        device: None or a CPU device.
        group_src: the sender's rank in the group, instead of ``src``.
        use_batch: accepted for torch's sake; makes no difference.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Returns:
        The sender's global rank; -1, with a warning, if this rank is not in the group.

    Raises:
        TypeError: ``object_list`` is no list.
        ValueError: the sender is given twice, not in the group, or this rank, or there is no other rank; or ``device``
            is no CPU.
        DistBackendError: the sender's list has another length; the message is gone.
        ProtocolError: an object has a pickle in it, and pickles are not read here.
        RankFailedError: the sender died or left; names it.
        CollectiveTimeoutError: nothing was sent in time; names who should have.

    Source: torch.distributed.recv_object_list
    """
    comm = members_of(group, "recv_object_list")
    if comm is None:
        return -1
    from_ = ANY
    if src is not None or group_src is not None:
        from_ = comm.ranks[_other(comm, group_root(comm, src, group_src, "src"), "src")]
    elif comm.size == 1:
        raise ValueError("the group has no other rank to receive from")
    listed(object_list, "object_list", None, "objects", (list,))
    _check_device(device)
    how = _rounds(comm, timeout, "recv_object_list")
    (arrived,) = records(1)
    sender = comm.receive(arrived, from_, RECORD_TAG, how(False))
    assert isinstance(sender, int)
    rank = comm.global_ranks.index(sender)
    parcel = Incoming(arrived)
    move_rests(comm, [], [(rank, parcel)], how)
    object_list[:] = _opened_list(parcel, comm, rank, len(object_list), "recv_object_list")
    return sender


# Arguments


def _one_a_rank(objects: Any, name: str, size: int) -> Any:
    if objects is None:
        raise ValueError(f"{name} is missing: give a list of {size} items, one a rank")
    return listed(objects, name, size, "items", (list,))


def _check_device(device: Any) -> None:
    if device is not None and str(getattr(device, "type", device)).partition(":")[0] != "cpu":
        raise ValueError(f"device={str(device)!r}: objects travel through host memory; leave device out or give 'cpu'")


def _other(comm: Communicator, group_rank: int, name: str) -> int:
    if group_rank == comm.rank:
        raise ValueError(f"{name} is this rank: a process does not send to itself, copy the objects instead")
    return group_rank


# Steps


def _rounds(comm: Communicator, timeout: Timeout, note: str) -> Callable[[bool], Options]:
    """Return what says how to make each call of an operation: all of them together have its timeout.

    Raises:
        RuntimeError: a batch is open, whose calls are made later.
    """
    if comm.batching:
        raise RuntimeError("objects cannot be sent in a batch of collectives: make the call before or after it")
    first = options(comm, timeout, False, [], note=lambda: note)
    end = time.monotonic() + first.timeout

    def how(async_op: bool) -> Options:
        return first._replace(timeout=max(0.0, end - time.monotonic()), async_op=async_op)

    return how


def _each(objects: list[Any], name: str) -> list[bytes]:
    return [dumps(obj, f"{name}[{number}]") for number, obj in enumerate(objects)]


def _raise(error: Exception | None) -> None:
    """Raise what kept this rank from sending its object, now that the others know."""
    if error is not None:
        raise error


def _same_count(comm: Communicator, counts: list[int], root: int) -> None:
    if any(count != counts[root] for count in counts):
        lengths = ", ".join(f"{count} on rank {rank}" for rank, count in zip(comm.global_ranks, counts, strict=True))
        raise CollectiveMismatchError(
            f"broadcast_object_list wants lists of the same length on all ranks, and they have {lengths}. No list was "
            "changed",
            ranks=[rank for rank, count in zip(comm.global_ranks, counts, strict=True) if count != counts[root]],
            op="broadcast_object_list",
            group=comm.name,
        )


def _opened_list(parcel: Incoming, comm: Communicator, rank: int, count: int, called: str) -> list[Any]:
    objects = parcel.open(comm, rank, called)
    if not isinstance(objects, list) or len(objects) != count:
        number = comm.global_ranks[rank]
        raise DistBackendError(
            f"{called}: rank {number} sent {parcel.count} objects, but object_list has {count} items: the lists must "
            "have the same length on both sides",
            ranks=[number],
            op=called,
            group=comm.name,
        )
    return objects
