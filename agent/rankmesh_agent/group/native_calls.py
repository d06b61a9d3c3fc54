"""A group's short calls, in shared memory or over TCP, that the compiled core carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from rankmesh_agent.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from rankmesh_agent.collectives.reduction import combine, ignore_fp_errors
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp
from rankmesh_agent.wire.stats import OpStats

Submit = Callable[[tuple[Any, ...], Sequence[Any], Options], Work | None]
_ONE_EXCHANGE = frozenset(
    {
        all_gather.small_link,
        all_reduce.small_link,
        barrier.over_link,
        broadcast.small_link,
        gather.small_link,
        reduce.small_link,
        reduce_scatter.small_link,
        scatter.small_link,
    }
)
"""Algorithms of one exchange of messages between all ranks, if these are few."""
_ONE_STEP = frozenset(
    {
        all_gather.over_segment,
        all_reduce.small_segment,
        all_to_all.over_segment,
        barrier.over_segment,
        broadcast.over_segment,
        gather.over_segment,
        reduce.small_segment,
        reduce_scatter.over_segment,
        scatter.over_segment,
    }
)
"""Algorithms that take one step, if the arrays fit into a slot or a lane: what they leave there, the core does, too."""

_IN_LANES = frozenset({OpType.SCATTER, OpType.REDUCE_SCATTER, OpType.ALL_TO_ALL})
"""Collectives in which a slot has a lane for each rank."""
_MAX_BYTES = 1 << 17
"""Of an array to be reduced: NumPy reduces longer ones faster, with wider instructions."""


class NativeCalls:
    """The calls of a group that the compiled core carries out."""

    def __init__(
        self,
        core: ModuleType,
        queue: object,
        state: GroupState,
        members: Segment | MessageLink,
        shared: tuple[Any, ...],
    ) -> None:
        self._core = core
        self.members: Segment | MessageLink | None = members
        self._state = state
        run: Callable[..., None] = ignore_fp_errors().run
        if isinstance(members, Segment):
            python = partial(run, _combine), all_to_all.complete, _split
            self._calls = core.Calls(queue, state, members, shared, core_contention, python)
        else:
            combined = partial(run, _combine_payloads)
            self._calls = core.TcpCalls(queue, state, members, shared, core_contention, combined, Transfer)
        self.submit: Submit = self._calls.submit
        self.at_once: Callable[..., bool] = self._calls.at_once
        self.run: Callable[[Any, Sequence[Any], Options], bool] = self._calls.run
        self._counts: dict[str, Any] = {}

    def close(self) -> None:
        """Leave all calls to the queue from now on; the memory may be unmapped."""
        self._calls.close()
        self.members = None

    def plan_of(self, call: Call, algorithm: Algorithm) -> Any:
        """Return the core's plan of a call, None if it does not know such calls."""
        members = self.members
        if members is None or algorithm not in _ONE_STEP | _ONE_EXCHANGE or call.counts is not None or call.place:
            return None
        counts = self._counts.setdefault(call.name, self._core.Counts())
        root = -1 if call.root is None else self._state.global_ranks.index(call.root)
        room, first, most = SMALL, 0, SMALL
        if isinstance(members, Segment):
            room = members.chunk_bytes if call.reduce_op is None else members.slot_bytes
            if call.kind in _IN_LANES and call.dtype is not None:
                room = members.lane(call.dtype) * call.dtype.itemsize
                first = members.rank * room
            most = room if call.reduce_op is None else min(_MAX_BYTES, room)
        arrays = _arrays(call.kind, members.rank, root, members.size)
        if arrays is None or call.nbytes > most:
            return None
        return self._core.Plan(self._state, call, counts, (root, room, first, most), arrays)

    def added_to(self, stats: Mapping[str, OpStats]) -> dict[str, OpStats]:
        """Return statistics by operation, with those of the core's calls."""
        return dict(stats) | {name: total_of(stats[name], counts) for name, counts in self._counts.copy().items()}


def total_of(stats: OpStats, counts: Any) -> OpStats:
    """Return the sum of an operation's statistics and those of the core's calls."""
    nbytes, seconds, buckets = counts.totals()
    found = OpStats(nbytes, seconds, 0, buckets)
    found.add(stats)
    return found


def _arrays(kind: OpType, rank: int, root: int, size: int) -> tuple[int, int, int, int] | None:
    """Return how many arrays a rank reads and writes, and which it copies itself; None if the core does not know it."""
    is_root = rank == root
    return {
        OpType.BARRIER: (0, 0, -1, -1),
        OpType.ALL_REDUCE: (1, 1, -1, -1),
        OpType.BROADCAST: (int(is_root), int(not is_root), -1, -1),
        OpType.ALL_GATHER: (1, size, -1, rank),
        OpType.REDUCE: (1, int(is_root), -1, -1),
        OpType.GATHER: (1, size, 0, rank) if is_root else (1, 0, -1, -1),
        OpType.SCATTER: (size, 1, rank, 0) if is_root else (0, 1, -1, -1),
        OpType.REDUCE_SCATTER: (size, 1, -1, -1),
        OpType.ALL_TO_ALL: (size, size, rank, rank),
    }.get(kind)


def _combine(segment: Segment, op: ReduceOp, begin: int, out: Any) -> None:
    """Reduce the parts in the slots, from a byte, into an array, as the algorithm does."""
    first = begin // out.itemsize
    last = first + out.size
    combine(op, [slot[first:last] for slot in segment.current_slots(out.dtype, last)], out)


def _combine_payloads(payloads: Sequence[bytes], op: ReduceOp, out: Any) -> None:
    combine(op, [np.frombuffer(payload, out.dtype) for payload in payloads], out)


def _split(arguments: tuple[Any, Any], options: Options, size: int) -> tuple[tuple[Any, Any], Options]:
    """Return the arguments of an all_to_all of whole arrays as lists of equal parts, and options with their details."""
    output, copied = arguments[0], arguments[1].copy()  # they may overlap
    outputs, inputs = [*output.reshape(size, -1)], [*copied.reshape(size, -1)]
    return (outputs, inputs), options._replace(details=all_to_all.splits(outputs, inputs))
