"""A group's calls, as whoever is one of its ranks makes them, wherever they are carried out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np

from rankmesh_agent.backends.registered import Outcome
from rankmesh_agent.group.call_queue import CallQueue, Options
from rankmesh_agent.group.coalescing import coalesce
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.wire.errors import DistBackendError, DistError, DistNetworkError
from rankmesh_agent.wire.ops import OpType, ReduceOp
from rankmesh_agent.wire.schemas import GroupInfo

Array = np.ndarray[Any, Any]
# Read off their class once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BARRIER = (
    OpType.ALL_REDUCE,
    OpType.ALL_GATHER,
    OpType.REDUCE_SCATTER,
    OpType.BARRIER,
)


class Communicator(ABC):
    """One rank's side of a group: a Communicator, or what stands for one in another process.

    Args:
        group: id of the group, equal at all members.
        name: name for people.
        ranks: global ranks of the members, by group rank.
        rank: this one's global rank.
        timeout: default seconds a call may take; ``set_timeout`` changes it.

    Attributes:
        id, name: see above.
        ranks: see above.
        rank: this one's group rank.
        size: how many members there are.
        records: whether some thread's collectives are being recorded.
        usual: how a synchronous call is to be made that asks for nothing in particular; has the default timeout.
    """

    _queue: CallQueue
    _submit: Callable[[tuple[Any, ...], Sequence[Any], Options], Work | None]
    """The order's, which makes a call; or what does more before."""

    on_device = False
    """Whether arrays are DeviceArrays, not NumPy's."""

    def __init__(self, group: int, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.id = group
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.default_options = Options(timeout)
        self.recording = False

    @property
    def timeout(self) -> float:
        """Default seconds a call may take."""
        return self.default_options.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change how long a call may take by default, from the next one on; calls under way or queued keep theirs.

        Args:
            timeout: as timedelta or seconds.

        Raises:
            TypeError: it is neither.
            ValueError: it is negative or NaN.
        """
        self.default_options = Options(seconds_of(timeout, self.timeout))

    @property
    @abstractmethod
    def failure(self) -> DistError | None:
        """The first failure, None while the group can go on."""

    @property
    @abstractmethod
    def global_ranks(self) -> tuple[int, ...]:
        """The numbers the user knows the members by, by group rank: ``ranks``, unless the world has shrunk."""

    @global_ranks.setter
    @abstractmethod
    def global_ranks(self, global_ranks: tuple[int, ...]) -> None: ...

    @property
    def queue(self) -> CallQueue:
        """The order of the calls."""
        return self._queue

    @property
    def medium(self) -> str:
        """What carries the collectives: ``shm``, ``tcp``, ``shm+tcp`` (several hosts), ``mpi`` or ``self``."""
        return self._queue.backend.medium

    @property
    def backend(self) -> str:
        """The name of what carries out the collectives."""
        return self._queue.backend.name

    @abstractmethod
    def use_custom_backend(self, name: str, engine: Any) -> None:
        """Have an engine from outside carry out the collectives from now on; the members do so at the same point.

        Args:
            name: what get_backend() says.
            engine: see backends.custom.CustomBackend.
        """

    def use_mpi(self, compares: bool) -> None:
        """Have MPI carry out the collectives and messages from now on; a synchronous collective call.

        Args:
            compares: whether the ranks are to compare their calls before each; they do if one of them says so.

        Raises:
            DistBackendError: there is no MPI at some member, or they are not processes of one MPI job; at all of them.
        """
        raise DistBackendError(
            "backend 'mpi' needs the rank's agent in this process, which makes the calls of MPI: do not attach to a "
            "standalone agent (hosting=embedded)"
        )

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """End the group at all members because of an error here."""

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        """Return the error of waiting for members, group ranks, of which one has left; None as far as all are there.

        Args:
            members: whom a call waits for.
            during: the call, in words.
        """
        return None

    @abstractmethod
    def info(self) -> GroupInfo:
        """Return the group as this rank sees it."""

    @abstractmethod
    def close(self) -> None:
        """End the group at this rank: queued calls fail, the worker ends. Does nothing the second time."""

    # Collectives: arrays are one-dimensional, contiguous and of a supported dtype; roots are group ranks

    def all_reduce(self, array: Array, op: ReduceOp, options: Options, subject: str = "") -> Work | None:
        """Reduce ``array`` over all members, in place.

        Args:
            array: see above.
            op: how.
            options: how the call is to be made.
            subject: what else has to be equal at all members: see Call.
        """
        if subject:
            return self._submit((_ALL_REDUCE, array.dtype, array.size, op, None, None, subject), (array, op), options)
        return self._submit((_ALL_REDUCE, array.dtype, array.size, op), (array, op), options)

    def all_reduce_again(self, array: Array, op: Any) -> bool:
        """Do what ``all_reduce`` does, synchronously, if it did so before with such an array; say whether it was done.

        Args:
            array: see above; of any dtype: one that is not supported has not been reduced before.
            op: the same holds.
        """
        return self._queue.again((_ALL_REDUCE, array.dtype, array.size, op), (array, op), self.default_options)

    def reduce(self, array: Array, op: ReduceOp, root: int, options: Options) -> Work | None:
        """Reduce ``array`` over all members, into the root's."""
        key = OpType.REDUCE, array.dtype, array.size, op, self.global_ranks[root]
        return self._submit(key, (array, op, root), options)

    def broadcast(self, array: Array, root: int, options: Options) -> Work | None:
        """Copy the root's array to all members."""
        key = OpType.BROADCAST, array.dtype, array.size, None, self.global_ranks[root]
        return self._submit(key, (array, root), options)

    def all_gather(self, outputs: Sequence[Array], array: Array, options: Options) -> Work | None:
        """Copy every member's ``array`` to the output of its group rank; they may differ in length."""
        count, counts = _counts(outputs)
        key = _ALL_GATHER, array.dtype, count, None, None, counts
        return self._submit(key, (outputs, array), options)

    def gather(self, outputs: Sequence[Array], array: Array, root: int, options: Options) -> Work | None:
        """Copy every member's ``array`` to the root's output of its group rank; no outputs elsewhere."""
        key = OpType.GATHER, array.dtype, array.size, None, self.global_ranks[root]
        return self._submit(key, (outputs, array, root), options)

    def scatter(self, output: Array, inputs: Sequence[Array], root: int, options: Options) -> Work | None:
        """Copy the root's input of each group rank to that member's ``output``; no inputs elsewhere."""
        key = OpType.SCATTER, output.dtype, output.size, None, self.global_ranks[root]
        return self._submit(key, (output, inputs, root), options)

    def reduce_scatter(self, output: Array, inputs: Sequence[Array], op: ReduceOp, options: Options) -> Work | None:
        """Reduce every member's input of each group rank into that member's ``output``; they may differ in length."""
        count, counts = _counts(inputs)
        key = _REDUCE_SCATTER, output.dtype, count, op, None, counts
        return self._submit(key, (output, inputs, op), options)

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array], options: Options) -> Work | None:
        """Copy every member's input of each group rank to that member's output of its own; each of its own length."""
        return self._submit((OpType.ALL_TO_ALL, inputs[0].dtype, -1), (outputs, inputs), options)

    def barrier(self, options: Options) -> Work | None:
        """Wait until all members have come."""
        return self._submit((_BARRIER,), (), options)

    def monitored_barrier(self, options: Options) -> None:
        """Wait until all members have come, in a way that can name those who do not, whatever the backend."""
        self.barrier(options)

    @abstractmethod
    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """Return an array in memory that the members share, where they share memory; a synchronous collective call.

        Raises:
            DistNetworkError: there is no room, or a member cannot map it; the same at all members.
        """

    def _registered_array(self, dtype: np.dtype[Any], count: int, options: Options, directory: str, job: str) -> Array:
        """Return an array in memory of the members', which is made in a directory, with the job in its name."""
        outcome: Outcome = []
        order, arguments = self._queue, (directory, job, count * dtype.itemsize, outcome)
        order.submit(
            (OpType.EMPTY, dtype, count),
            arguments,
            options._replace(on_complete=lambda: order.use_backend(order.backend)),
        )
        made = outcome[0]
        if isinstance(made, DistNetworkError):
            raise made
        return made.view(dtype)

    def open_batch(self) -> None:
        """Record this thread's collectives instead of making them.

        Raises:
            RuntimeError: a batch is open.
        """
        self._queue.open_batch()
        self.recording = True

    @property
    def batching(self) -> bool:
        """Whether this thread's collectives are being recorded."""
        return self._queue.batching

    def close_batch(self, options: Options | None) -> list[Work]:
        """Make the recorded collectives, or with None forget them; return the Works of asynchronous ones."""
        recorded = self._queue.close_batch()
        self.recording = False
        if options is None:
            return []
        works = []
        for call in coalesce(recorded):
            how = options._replace(result=call.result, on_complete=call.on_complete, details=call.details)
            works.append(self._queue.submit(call.key, call.arguments, how))
        return [work for work in works if work is not None]

    # Point-to-point: ranks are the mesh's

    @abstractmethod
    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        """Send ``array`` to a rank."""

    @abstractmethod
    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        """Receive into ``array`` from a rank, or from ANY; return the source's number, or the Work."""

    def batch_messages(self) -> AbstractContextManager[object]:
        """Have the messages that are begun in the block go out together, where one could hold up another."""
        return contextlib.nullcontext()


def _counts(arrays: Sequence[Array]) -> tuple[int, tuple[int, ...] | None]:
    """Return the length of the arrays, and their lengths if they differ."""
    first = arrays[0].size
    for array in arrays:
        if array.size != first:
            return -1, tuple(array.size for array in arrays)
    return first, None
