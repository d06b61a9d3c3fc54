"""Communicator interface: one rank's side of a group, wherever its calls are executed."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np

from rankmesh_agent.backends.base import Backend
from rankmesh_agent.group.call_monitor import CallMonitor
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.flight_recorder import Record, RecordedCalls, in_flight
from rankmesh_agent.group.native_calls import Submit
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.state import START_UP, GroupState
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.wire.errors import DistBackendError, DistError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp
from rankmesh_agent.wire.schemas import MAX_IN_FLIGHT, GroupInfo
from rankmesh_agent.wire.stats import OpStats

Array = np.ndarray[Any, Any]
_Key = tuple[Any, ...]
_TIMEOUT_TYPES = frozenset((float, int, timedelta))
_MAX_TIMEOUTS = 64
# Read off their class once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
BARRIER, ALL_REDUCE, BROADCAST, ALL_GATHER, _, REDUCE, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, _ = OpType
_BARRIER_KEY = BARRIER, None, 0, None, None


class Communicator(ABC):
    """One rank's side of a group, like an MPI communicator.

    Args:
        timeout: default seconds a call may take; ``set_timeout`` changes it.

    Attributes:
        batch: records the collectives of a thread in place of ``submit``; None while all are executed.
        default_options: options of a synchronous call without any of its own; has the default timeout.
    """

    state: GroupState
    queue: CallQueue
    submit: Submit
    """The queue's method that executes a call, or one that does more before, or records the call."""

    at_once: Callable[..., bool] | None = None
    """The compiled core's ``at_once``, for calls with ``default_options``; None without it, and in a batch."""

    message_at_once: Callable[..., bool] | None = None

    gpus: Any = None
    """Selects the communicator for arrays on GPUs, once there were any."""

    launch_monitor: CallMonitor | None = None
    """Finds calls on GPUs that cannot complete; None in an attached process, which gets no reports of other members."""

    on_device = False
    """True if arrays are DeviceArrays, not NumPy's."""

    def __init__(self, group: int, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.id = group
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.default_options = Options(timeout)
        self._options_within: dict[timedelta | float, Options] = {}
        self.batch: object | None = None

    @property
    def timeout(self) -> float:
        """Default seconds a call may take."""
        return self.default_options.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the default timeout of the next calls; calls under way or queued keep theirs.

        Args:
            timeout: as timedelta or seconds.

        Raises:
            TypeError: it is neither.
            ValueError: it is negative or NaN.
        """
        self.default_options = Options(seconds_of(timeout, self.timeout))

    def options_within(self, timeout: timedelta | float) -> Options:
        """Return the options of a synchronous call with a timeout and without any others of its own."""
        keeps = type(timeout) in _TIMEOUT_TYPES  # others may not be hashable, or may change
        options = self._options_within.get(timeout) if keeps else None
        if options is None:
            options = Options(seconds_of(timeout, self.timeout))
            if keeps and len(self._options_within) < _MAX_TIMEOUTS:
                self._options_within[timeout] = options
        return options

    @property
    def failure(self) -> DistError | None:
        """The first failure, None while the group works."""
        return self.state.failure

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, by group rank: ``ranks``, unless the world has shrunk."""
        return self.state.global_ranks

    def set_global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        """Change the ranks by which errors and results name the members."""
        self.state.renumber(global_ranks)
        self.queue.use_backend(self.queue.backend)  # forgets the plans: their roots have other ranks now

    @property
    def medium(self) -> str:
        """Medium of the collectives: ``shm``, ``tcp``, ``shm+tcp`` (several hosts), ``mpi`` or ``self``."""
        return self.queue.backend.medium

    @property
    def backend(self) -> str:
        """Name of the backend that executes the collectives."""
        return self.queue.backend.name

    def use_backend(self, backend: Backend) -> None:
        """Execute the calls on a backend's device by that backend from now on; all members do so at the same point."""
        self.queue.use_backend(backend)

    def for_reduction(self, dtype: np.dtype[Any], op: ReduceOp) -> Communicator:
        """Return the communicator for a reduction: this one, unless its library lacks the reduction."""
        return self

    def use_custom_backend(self, name: str, engine: Any) -> None:
        """Have the user's engine execute the collectives from now on; all members do so at the same point."""
        raise DistBackendError(f"no engine can execute the calls of group {self.name!r}")

    def end_in_child(self) -> None:
        """End the group in a forked child: calls raise an error, and nothing reaches the parent or its peers."""
        self.state.end_in_child()
        self.queue.end_in_child()
        self.batch, self.submit, self.at_once, self.message_at_once = None, self.queue.submit, None, None

    def abort(self, error: BaseException) -> None:
        """End the group at all members because of an error here."""
        self.state.abort(error)

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        """Return the error of a wait for members of which one is lost, None as far as all are there."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the group at this rank: queued calls fail, the worker ends. Does nothing the second time."""

    # Introspection

    def info(self) -> GroupInfo:
        """Return the group as this rank sees it."""
        state = self.state
        last = "" if state.call is START_UP else state.call.name
        failure = "" if state.failure is None else state.failure.message
        started_at, now = state.started_at, time.monotonic()
        stats = self.op_stats().values()
        nbytes = sum(each.nbytes for each in stats)
        seconds = sum(each.seconds for each in stats) + (0.0 if started_at is None else now - started_at)
        active = [in_flight(record, now) for record in self.active_records()[:MAX_IN_FLIGHT]]
        ranks = list(self.ranks)
        return GroupInfo(state.id, self.name, ranks, state.seq, self.medium, last, failure, nbytes, active, seconds)

    def recorded(self) -> Sequence[RecordedCalls]:
        """Return what has records of the group's calls and messages."""
        return [self.queue]

    def active_records(self) -> list[Record]:
        """Return the group's calls and messages that have not ended."""
        return [record for each in self.recorded() for record in each.active_records()]

    def algorithms(self) -> Mapping[Call, str]:
        """Return the names of the algorithms of calls, as far as they are known."""
        return self.queue.algorithms()

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the group's statistics, by operation."""
        found: dict[str, OpStats] = {}
        for each in self.recorded():
            for op, stats in each.op_stats().items():
                found.setdefault(op, OpStats()).add(stats)
        return found

    # Collectives: arrays are one-dimensional, contiguous and of a supported dtype; roots are group ranks; see Call for
    # the subject

    def all_reduce(self, array: Array, op: ReduceOp, options: Options, subject: str = "") -> Work | None:
        """Reduce ``array`` over all members, in place."""
        if subject:
            return self.submit((ALL_REDUCE, array.dtype, array.size, op, None, None, subject), (array, op), options)
        return self.submit((ALL_REDUCE, array.dtype, array.size, op, None), (array, op), options)

    def reduce(self, array: Array, op: ReduceOp, root: int, options: Options, subject: str = "") -> Work | None:
        """Reduce ``array`` over all members, into the root's."""
        key: _Key = (REDUCE, array.dtype, array.size, op, self.state.global_ranks[root])
        if subject:
            key = *key, None, subject
        return self.submit(key, (array, op, root), options)

    def broadcast(self, array: Array, root: int, options: Options, subject: str = "") -> Work | None:
        """Copy the root's array to all members."""
        key: _Key = (BROADCAST, array.dtype, array.size, None, self.state.global_ranks[root])
        if subject:
            key = *key, None, subject
        return self.submit(key, (array, root), options)

    def all_gather(self, outputs: Sequence[Array], array: Array, options: Options, subject: str = "") -> Work | None:
        """Copy every member's ``array`` to the output of its group rank; they may differ in length."""
        count, counts = _counts(outputs)
        key: _Key = (ALL_GATHER, array.dtype, count, None, None)
        if subject or counts:
            key = *key, counts, subject
        return self.submit(key, (outputs, array), options)

    def gather(self, outputs: Sequence[Array], array: Array, root: int, options: Options) -> Work | None:
        """Copy every member's ``array`` to the root's output of its group rank; other ranks have no outputs."""
        key = GATHER, array.dtype, array.size, None, self.state.global_ranks[root]
        return self.submit(key, (outputs, array, root), options)

    def scatter(self, output: Array, inputs: Sequence[Array], root: int, options: Options) -> Work | None:
        """Copy the root's input of each group rank to that member's ``output``; other ranks have no inputs."""
        key = SCATTER, output.dtype, output.size, None, self.state.global_ranks[root]
        return self.submit(key, (output, inputs, root), options)

    def reduce_scatter(self, output: Array, inputs: Sequence[Array], op: ReduceOp, options: Options) -> Work | None:
        """Reduce every member's input of each group rank into that member's ``output``; they may differ in length."""
        count, counts = _counts(inputs)
        key: _Key = (REDUCE_SCATTER, output.dtype, count, op, None)
        if counts:
            key = *key, counts
        return self.submit(key, (output, inputs, op), options)

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array], options: Options) -> Work | None:
        """Copy every member's input of each group rank to that member's output of its own; each of its own length."""
        return self.submit((ALL_TO_ALL, inputs[0].dtype, -1, None, None), (outputs, inputs), options)

    def barrier(self, options: Options) -> Work | None:
        """Wait until all members have arrived."""
        return self.submit(_BARRIER_KEY, (), options)

    def monitored_barrier(self, options: Options) -> None:
        """Wait until all members have arrived, in a way that can name those that do not, whatever the backend."""
        subject = self.queue.backend.monitored_subject
        self.queue.submit((BARRIER, None, 0, None, None, None, subject), (), options)

    @abstractmethod
    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """Return an array in memory that the members share, where they share memory; a synchronous collective call.

        Raises:
            DistNetworkError: there is no room, or a member cannot map it; the same at all members.
        """

    # Point-to-point: ranks are those in ``ranks``

    @abstractmethod
    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        """Send ``array`` to a rank."""

    @abstractmethod
    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        """Receive into ``array`` from a rank, or from ANY; return the source's global rank, or the Work."""

    def batch_messages(self) -> AbstractContextManager[object]:
        """Send the messages that begin in the block together, where one could hold up another."""
        return contextlib.nullcontext()


def _counts(arrays: Sequence[Array]) -> tuple[int, tuple[int, ...] | None]:
    """Return the length of the arrays, and their lengths if they differ."""
    first = arrays[0].size
    for array in arrays:
        if array.size != first:
            return -1, tuple(array.size for array in arrays)
    return first, None
