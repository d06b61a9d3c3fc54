"""Batches of collectives: coalescing, as torch calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rankmesh._collectives.arguments import Timeout, listed, members_of, options
from rankmesh._collectives.gather_scatter import all_gather
from rankmesh._collectives.reduce_broadcast import all_reduce
from rankmesh._session.session import Group, NonMember, communicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import PremulSum, ReduceOp


class Batch:
    """What ``batch()`` gives: the Works of its collectives, once it has ended.

    Attributes:
        works: one a collective that was made; empty if they were made synchronously.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self, timeout: Timeout = None) -> None:
        """Wait for all collectives of an asynchronous batch.

        Args:
            timeout: how long to wait for each, timedelta or seconds; by default as long as it may take.

        Raises:
            DistError: one of them failed.
        """
        for work in self.works:
            work.wait(timeout)


@contextlib.contextmanager
def batch(group: Group = None, async_ops: bool = False, *, timeout: Timeout = None) -> Iterator[Batch]:
    """Make the collectives called in the block together when it ends; neighbouring all_reduces become one.

    The arrays must not be touched before, nor may one call work on the result of another: some are copied as they are
    called. An error in the block forgets its collectives: none is made.

    Args:
        group: the group whose collectives are batched, the world by default. Those of other groups, point-to-point
            messages, and calls of other threads are made at once.
        async_ops: return at once at the end of the block; ``wait()`` of the Batch waits.
        timeout: how long each may take, timedelta or seconds; the group's by default.

    Raises:
        RuntimeError: a batch of this group is open.

    Source: torch.distributed's coalescing manager
    """
    made = Batch()
    if isinstance(group, NonMember):
        yield made  # each of its collectives warns
        return
    comm = communicator(group)
    how = options(comm, timeout, async_ops, [])
    comm.open_batch()
    try:
        yield made
    except BaseException:
        comm.close_batch(None)
        raise
    made.works = comm.close_batch(how)


def _coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> contextlib.AbstractContextManager[Batch]:
    """Return ``batch(group, async_ops)``; ``device`` is accepted for torch's sake.

    Source: torch.distributed.distributed_c10d._coalescing_manager
    """
    return batch(group, async_ops)


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOp | PremulSum = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Batch | None:
    """Reduce several arrays over all ranks, in place, together.

    Args:
        tensors: list of arrays as for all_reduce, the same on all ranks.
        op, group: as for all_reduce.
        async_op: return at once; the arrays must not be touched before ``wait()`` of the Batch returns.
        timeout: how long it may take, timedelta or seconds; the group's by default.

    Returns:
        A Batch if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        TypeError: ``tensors`` is no list.
        As all_reduce.

    Source: torch.distributed.all_reduce_coalesced
    """
    if members_of(group, "all_reduce_coalesced") is None:
        return None
    listed(tensors, "tensors")
    with batch(group, async_op, timeout=timeout) as made:
        for tensor in tensors:
            all_reduce(tensor, op, group)
    return made if async_op else None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Batch | None:
    """Gather several arrays from all ranks.

    Args:
        output_tensor_lists: by group rank, that rank's arrays.
        input_tensor_list: this rank's arrays.
        group: as for all_gather.
        async_op: return at once; no array must be touched before ``wait()`` of the Batch returns.
        timeout: how long each may take, timedelta or seconds; the group's by default.

    Returns:
        A Batch if ``async_op``, else None. None also, with a warning, at ranks that are not in the group.

    Raises:
        TypeError: an argument is no list.
        ValueError: there is not one list of outputs a rank, or one has another length than the inputs.
        As all_gather.

    Source: torch.distributed.all_gather_coalesced
    """
    comm = members_of(group, "all_gather_coalesced")
    if comm is None:
        return None
    listed(input_tensor_list, "input_tensor_list")
    listed(output_tensor_lists, "output_tensor_lists", comm.size, "lists")
    for number, outputs in enumerate(output_tensor_lists):
        listed(outputs, f"output_tensor_lists[{number}]")
        if len(outputs) != len(input_tensor_list):
            raise ValueError(
                f"output_tensor_lists[{number}] has {len(outputs)} arrays, input_tensor_list {len(input_tensor_list)}: "
                "each rank has the same number of arrays"
            )
    with batch(group, async_op, timeout=timeout) as made:
        for number, tensor in enumerate(input_tensor_list):
            all_gather([outputs[number] for outputs in output_tensor_lists], tensor, group)
    return made if async_op else None
