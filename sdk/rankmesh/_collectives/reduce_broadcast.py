"""The collectives in which every rank has one array: reductions, broadcast, barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rankmesh._collectives.arguments import Timeout, all_of, group_root, in_place, members_of, options
from rankmesh._collectives.reduce_op import reduction
from rankmesh._session.session import Group, finish_on_gpus
from rankmesh._tensors.arrays import destination, source
from rankmesh._tensors.containers import Array
from rankmesh_agent.collectives.reduction import premultiplied
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ops import PremulSum, ReduceOp


def all_reduce(
    tensor: Any,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place: afterwards it is the same, bit for bit, everywhere.

    Elements are reduced in rank order in shared memory. Over TCP more than 64 KiB may be reduced as a tree or round a
    ring, and over several hosts host by host: floating-point sums may differ from those in their last bits, the results
    of other types do not. float16, bfloat16 and float8 are accumulated in float32 and rounded once; integers wrap
    around, but for AVG, which accumulates in 64 bits and rounds towards zero; SUM and PRODUCT of bool are 'or' and
    'and'.

    Args:
        tensor: array of any shape, with the same number of elements and dtype on all ranks: a NumPy array, a torch
            tensor, a CuPy array, or what else exports a writable buffer or DLPack. Non-contiguous ones work (through a
            copy). On GPUs the call is enqueued on the current stream: see docs/gpu.md.
        op: SUM, PRODUCT or AVG of integers (AVG not of bool), floats and complex numbers; MIN or MAX of integers, bool
            and floats; BAND, BOR or BXOR of integers and bool; ``ReduceOp.PREMUL_SUM(factor)``, the sum of what each
            rank multiplies by its own factor first.
        group: the group, the world by default.
        async_op: return at once; ``tensor`` must not be touched before the Work's ``wait()`` returns.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        TypeError: ``tensor`` is no array that can be communicated, or ``op`` is not defined for its dtype.
        ValueError: ``tensor`` is read-only.
        CollectiveMismatchError: the ranks did not make the same call.
        RankFailedError: a rank died or left; names it.
        CollectiveTimeoutError: a rank did not come in time; names it.
        DistBackendError: the group failed earlier; it is the first failure once more.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.all_reduce
    """
    comm, array, how = in_place(group, "all_reduce", tensor, timeout, async_op)
    if comm is None:
        return None
    if type(op) is not ReduceOp or op is ReduceOp.PREMUL_SUM:
        op, factor = reduction(op, array.dtype)
        if factor is not None:
            array, after = scaled(array, how.on_complete, factor)
            how = options(comm, timeout, async_op, [tensor], after)
    return comm.all_reduce(array, op, how)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into that of one rank; the others' stay as they are.

    Args:
        tensor: as for all_reduce; written on the destination only.
        dst: global rank that gets the result.
        op: as for all_reduce.
        group: the group, the world by default.
        async_op: return at once; ``tensor`` must not be touched before the Work's ``wait()`` returns.
        group_dst: the destination's rank in the group, instead of ``dst``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the destination is missing, given twice, or not in the group.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.reduce
    """
    comm = members_of(group, "reduce", tensor)
    if comm is None:
        return None
    root = group_root(comm, dst, group_dst, "dst")
    receives = comm.rank == root
    array, after = destination(tensor, "tensor", comm) if receives else (source(tensor, "tensor", comm), None)
    how, factor = reduction(op, array.dtype)
    if factor is not None:
        array, after = scaled(array, after, factor) if receives else (premultiplied(factor, array), None)
    return comm.reduce(array, how, root, options(comm, timeout, async_op, [tensor], after))


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy ``tensor`` of one rank to all ranks.

    Args:
        tensor: array with the same number of elements and dtype on all ranks; read on the source, written elsewhere.
        src: global rank whose data is copied.
        group: the group, the world by default.
        async_op: return at once; ``tensor`` must not be touched before the Work's ``wait()`` returns.
        group_src: the source's rank in the group, instead of ``src``.
        timeout: how long the operation may take, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        ValueError: the source is missing, given twice, or not in the group.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.broadcast
    """
    comm = members_of(group, "broadcast", tensor)
    if comm is None:
        return None
    root = group_root(comm, src, group_src, "src")
    array, after = (source(tensor, "tensor", comm), None) if comm.rank == root else destination(tensor, "tensor", comm)
    return comm.broadcast(array, root, options(comm, timeout, async_op, [tensor], after))


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Wait until all ranks of the group have come here, and the GPUs have carried out the group's calls before it.

    Args:
        group: the group, the world by default.
        async_op: return at once, as far as ranks are waited for; the Work's ``wait()`` waits.
        device_ids: accepted for torch's sake; there is no device to guess: the ranks meet on their hosts.
        timeout: how long to wait, timedelta or seconds; the group's by default.

    Returns:
        A Work if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        TypeError: ``device_ids`` is no list.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.barrier
    """
    comm = members_of(group, "barrier")
    if comm is None:
        return None
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids must be a list of device numbers, got {device_ids!r}")
    how = options(comm, timeout, async_op, [])
    finish_on_gpus(group, how.timeout)
    return comm.barrier(how)


def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of the group have come here, and say which did not come in time.

    Unlike with torch every rank that came says so, not rank 0 alone. After a failure the group is given up.

    Args:
        group: the group, the world by default.
        timeout: how long to wait, timedelta or seconds; the group's by default.
        wait_all_ranks: name all ranks that did not come, not only the first.

    Raises:
        CollectiveTimeoutError: ranks did not come; ``ranks`` are the first, or all, of them.
        RuntimeError: a batch of collectives is open.
        As all_reduce.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.monitored_barrier
    """
    comm = members_of(group, "monitored_barrier")
    if comm is None:
        return
    if comm.batching:
        raise RuntimeError("monitored_barrier() cannot be part of a batch of collectives: call it before or after it")
    how = options(comm, timeout, False, [])
    earlier = comm.failure
    try:
        comm.monitored_barrier(how)
    except (CollectiveTimeoutError, GroupAbortedError) as error:  # our time was over, or another rank's a moment before
        if earlier is not None or error.op != "barrier" or not error.ranks:
            raise
        named = error.ranks if wait_all_ranks else error.ranks[:1]
        words = f"ranks {', '.join(map(str, named))}" if len(named) > 1 else f"rank {named[0]}"
        raise CollectiveTimeoutError(
            f"{words} failed to pass monitored_barrier in {how.timeout * 1000:.0f} ms ({error.message})",
            ranks=named,
            op="monitored_barrier",
            group=comm.name,
            seq=error.seq,
        ) from None


def scaled(array: Array, after: Callable[[], None] | None, factor: complex) -> tuple[Array, Callable[[], None] | None]:
    """Return a copy of ``array`` times ``factor`` to be reduced, and what brings the result back."""
    product = premultiplied(factor, array)

    def back() -> None:
        array[:] = product

    return product, all_of([back, after])
