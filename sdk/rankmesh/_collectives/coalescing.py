"""Coalescing: batches of collectives that are made together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rankmesh._collectives.arguments import Timeout, check_list, communicator, options
from rankmesh._collectives.call_recorder import CallRecorder
from rankmesh._collectives.gather import all_gather
from rankmesh._collectives.reduce import all_reduce
from rankmesh._session.process_group import Group, NonMember
from rankmesh._session.session import communicator_of
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.ops import PremulSum, ReduceOp


class Batch:
    """The Works of the collectives in a ``batch()`` that has ended.

    Attributes:
        works: one per collective; empty if they were synchronous.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self, timeout: Timeout = None) -> None:
        """Wait for all collectives of an asynchronous batch.

        Args:
            timeout: limit for each, timedelta or seconds; the operation's own by default.

        Raises:
            DistError: one of them failed.
        """
        for work in self.works:
            work.wait(timeout)


@contextlib.contextmanager
def batch(group: Group = None, async_ops: bool = False, *, timeout: Timeout = None) -> Iterator[Batch]:
    """Make the collectives called in the block together when it ends; consecutive all_reduces become one.

    The arrays must not be used before, and no call may depend on the result of another: some arrays are copied when
    their collective is called. An error in the block discards its collectives: none is made.

    Args:
        group: the group whose collectives are batched, the world by default. Those of other groups, point-to-point
            messages, and calls of other threads are made immediately.
        async_ops: do not wait at the end of the block; ``wait()`` of the Batch waits.
        timeout: limit for each, timedelta or seconds; the group's by default.

    Raises:
        RuntimeError: a batch of this group is open.

    Source: torch.distributed's coalescing manager
    """
    batched = Batch()
    if isinstance(group, NonMember):
        yield batched  # each of its collectives warns
        return
    comm = communicator_of(group)
    call_options = options(comm, timeout, async_ops, [])
    recorder = CallRecorder(comm)
    try:
        yield batched
    except BaseException:
        recorder.close(None)
        raise
    batched.works = recorder.close(call_options)


def _coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> contextlib.AbstractContextManager[Batch]:
    """Return ``batch(group, async_ops)``; ``device`` is accepted for compatibility with torch."""
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

    The other arguments, and the result, are those of all_reduce, with a Batch in the place of a Work.

    Raises:
        TypeError: ``tensors`` is not a list.
        Exception: as for all_reduce.
    """
    if communicator(group, "all_reduce_coalesced") is None:
        return None
    check_list(tensors, "tensors")
    with batch(group, async_op, timeout=timeout) as batched:
        for tensor in tensors:
            all_reduce(tensor, op, group)
    return batched if async_op else None


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

    The other arguments, and the result, are those of all_reduce, with a Batch in the place of a Work.

    Raises:
        TypeError: an argument is not a list.
        ValueError: there is not one list of outputs a rank, or one has another length than the inputs.
        Exception: as for all_gather.
    """
    comm = communicator(group, "all_gather_coalesced")
    if comm is None:
        return None
    check_list(input_tensor_list, "input_tensor_list")
    check_list(output_tensor_lists, "output_tensor_lists", comm.size, "lists")
    for number, outputs in enumerate(output_tensor_lists):
        check_list(outputs, f"output_tensor_lists[{number}]")
        if len(outputs) != len(input_tensor_list):
            raise ValueError(
                f"output_tensor_lists[{number}] has {len(outputs)} arrays, input_tensor_list {len(input_tensor_list)}: "
                "each rank has the same number of arrays"
            )
    with batch(group, async_op, timeout=timeout) as batched:
        for number, tensor in enumerate(input_tensor_list):
            all_gather([outputs[number] for outputs in output_tensor_lists], tensor, group)
    return batched if async_op else None
