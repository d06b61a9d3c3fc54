"""barrier and monitored_barrier."""

from __future__ import annotations

from collections.abc import Sequence

import rankmesh._session.debug as _debug
from rankmesh._collectives.arguments import Timeout, communicator, options
from rankmesh._collectives.coalescing import is_recording
from rankmesh._session.process_group import Group
from rankmesh_agent.group.communicator import BARRIER
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ranges import named_ranks


def barrier(
    group: Group = None, async_op: bool = False, device_ids: Sequence[int] | None = None, timeout: Timeout = None
) -> Work | None:
    """Wait until all ranks of the group have made the call, and GPUs have finished the group's calls before it.

    Args:
        group: the group, the world by default.
        async_op: return without waiting for other ranks; the Work's ``wait()`` waits.
        device_ids: accepted for compatibility with torch; the barrier uses host memory.
        timeout: limit for the wait, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. Returns None and warns on ranks outside the group.

    Raises:
        TypeError: ``device_ids`` is not a list.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "barrier")
    if comm is None:
        return None
    plain = timeout is None and not async_op and device_ids is None and comm.gpus is None and _debug.below_detail
    if plain and comm.at_once and comm.at_once(comm.default_options, BARRIER):
        return None
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids must be a list of device numbers, got {device_ids!r}")
    call_options = comm.default_options if plain and comm.batch is None else options(comm, timeout, async_op, [])
    if comm.gpus is not None:
        comm.gpus.finish(call_options.timeout)
    return comm.barrier(call_options)


def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of the group have made the call, and name the ranks that did not in time.

    Unlike in torch, the error is raised on every rank that made the call, not only on rank 0. After a failure the group
    cannot be used.

    Args:
        group: the group, the world by default.
        timeout: limit for the wait, timedelta or seconds; the group's by default.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        CollectiveTimeoutError: ranks are missing; ``ranks`` are the first, or all, of them.
        RuntimeError: a batch of collectives is open.
        Exception: as for all_reduce.
    """
    comm = communicator(group, "monitored_barrier")
    if comm is None:
        return
    if is_recording(comm):
        raise RuntimeError("monitored_barrier() cannot be part of a batch of collectives: call it before or after it")
    call_options = options(comm, timeout, False, [])
    earlier = comm.failure
    try:
        comm.monitored_barrier(call_options)
    except (
        CollectiveTimeoutError,
        GroupAbortedError,
    ) as error:  # this rank's deadline passed, or another's a moment before
        if earlier is not None or error.op != "barrier" or not error.ranks:
            raise
        named = error.ranks if wait_all_ranks else error.ranks[:1]
        raise CollectiveTimeoutError(
            f"{named_ranks(named)} failed to pass monitored_barrier in {call_options.timeout * 1000:.0f} ms "
            f"({error.message})",
            ranks=named,
            op="monitored_barrier",
            group=comm.name,
            seq=error.seq,
        ) from None
