"""Backend over NCCL, by way of nccl4py, for groups in which every rank has a GPU of its own.

Data that is not reduced moves as bytes. The arithmetic is NCCL's: it rounds half types at each step, and its kernels
decide how MIN and MAX treat NaN. Reductions that NCCL does not have (16-bit integers, float8, 'xor', products of
complex numbers, averages of integers) go through host memory: see ``reduction``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu import exchange
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline, in_thread
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ops import Call, ReduceOp

_log = logging.getLogger("rankmesh")
_UINT8 = 1
"""ncclUint8, also the type of data that is not reduced."""
_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): _UINT8,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
    np.dtype(ml_dtypes.bfloat16): 9,
}
"""NCCL's enumeration of the element types it reduces."""
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
"""NCCL's enumeration of its reductions."""
_COMPONENTS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
_BOOL_OPS = {
    ReduceOp.SUM: 2, ReduceOp.MAX: 2, ReduceOp.BOR: 2, ReduceOp.PRODUCT: 3, ReduceOp.MIN: 3, ReduceOp.BAND: 3,
}  # fmt: skip
"""For bytes that are 0 or 1, 'or' is the maximum, and 'and' the minimum."""
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)
_OF_FLOATS = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)


class NcclReduction(NamedTuple):
    """A reduction as NCCL performs it.

    Attributes:
        type, op: in NCCL's enumerations; the operation of PREMUL_SUM is created for each call.
        width: NCCL elements per element.
    """

    type: int
    op: int
    width: int = 1


@functools.cache
def reduction(dtype: np.dtype[Any], op: ReduceOp) -> NcclReduction | None:
    """Return how NCCL performs a reduction, None if it does not."""
    if dtype == np.bool_:
        return NcclReduction(_UINT8, _BOOL_OPS[op]) if op in _BOOL_OPS else None
    if dtype in _COMPONENTS:
        return NcclReduction(_TYPES[_COMPONENTS[dtype]], _OPS[op], 2) if op in _SUMS else None
    if dtype not in _TYPES or (op in _OF_FLOATS and dtype.kind in "iu"):
        return None
    if op is ReduceOp.PREMUL_SUM:
        return NcclReduction(_TYPES[dtype], -1)
    return NcclReduction(_TYPES[dtype], _OPS[op]) if op in _OPS else None


_HOST_IMMEDIATE = 1
"""ncclScalarHostImmediate: the factor of PREMUL_SUM is read when the operation is created."""
_IN_PROGRESS = 7
"""ncclInProgress, which is no error."""
_ID_BYTES = 128
"""Size of ncclUniqueId."""
_POLL_SECONDS = 0.05
_DESTROY_SECONDS = 30.0
"""Time limit for destroying communicators, which NCCL does together with the other ranks of the host."""
_GROUPED_ABORT_VERSION = 22200
"""First version of NCCL that aborts communicators as a group: one by one, the first may wait for the others."""
T = TypeVar("T")
_RankedArrays = Sequence[tuple[int, DeviceArray]]
_Key = tuple[tuple[int, ...], int]
"""Key of a communicator: sender and receiver of its messages, () for collectives; and this rank's device."""


class _NcclRank:
    """This process's membership of an NCCL communicator, for one GPU."""

    def __init__(self, nccl: Any, comm: Any, rank: int, size: int) -> None:
        self._nccl = nccl
        self.comm = comm
        self.rank = rank
        self.size = size

    @contextlib.contextmanager
    def _reduction(self, array: DeviceArray, op: ReduceOp) -> Iterator[NcclReduction]:
        """Return how NCCL reduces an array; the reduction is one that it has, see GpuCommunicator.for_reduction."""
        how = reduction(array.dtype, op)
        assert how is not None
        if array.factor is None:
            yield how
            return
        factor = np.array([array.factor], array.dtype)
        own = self._nccl.red_op_create_pre_mul_sum(factor.ctypes.data, how.type, _HOST_IMMEDIATE, self.comm)
        try:
            yield how._replace(op=own)
        finally:
            self._nccl.red_op_destroy(own, self.comm)

    def all_reduce(self, launch: Launch, array: DeviceArray, op: ReduceOp) -> None:
        pointer = array.pointer
        with self._reduction(array, op) as (kind, own, width):
            self._nccl.all_reduce(pointer, pointer, array.size * width, kind, own, self.comm, launch.stream)

    def reduce(self, launch: Launch, array: DeviceArray, op: ReduceOp, root: int) -> None:
        pointer = array.pointer
        with self._reduction(array, op) as (kind, own, width):
            self._nccl.reduce(pointer, pointer, array.size * width, kind, own, root, self.comm, launch.stream)

    def broadcast(self, launch: Launch, array: DeviceArray, root: int) -> None:
        self._nccl.broadcast(array.pointer, array.pointer, array.nbytes, _UINT8, root, self.comm, launch.stream)

    def all_gather(self, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray) -> None:
        comm, stream = self.comm, launch.stream
        if _equal_sizes(outputs):  # at all ranks or none, unlike contiguity
            rows = outputs if _are_contiguous(outputs) else launch.scratch_rows(array, self.size)
            self._nccl.all_gather(array.pointer, rows[0].pointer, array.nbytes, _UINT8, comm, stream)
            _copy_all(rows, outputs, stream)
            return
        with _grouped(self._nccl):
            for root, output in enumerate(outputs):
                source = array if root == self.rank else output
                if output.nbytes:
                    self._nccl.broadcast(source.pointer, output.pointer, output.nbytes, _UINT8, root, comm, stream)

    def reduce_scatter(self, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], op: ReduceOp) -> None:
        comm, stream = self.comm, launch.stream
        with self._reduction(inputs[0], op) as (kind, own, width):
            if _equal_sizes(inputs):
                rows = inputs if _are_contiguous(inputs) else launch.scratch_rows(output, self.size)
                _copy_all(inputs, rows, stream)
                count = output.size * width
                self._nccl.reduce_scatter(rows[0].pointer, output.pointer, count, kind, own, comm, stream)
                return
            with _grouped(self._nccl):
                for root, part in enumerate(inputs):
                    to = output.pointer if root == self.rank else part.pointer
                    if part.size:
                        self._nccl.reduce(part.pointer, to, part.size * width, kind, own, root, comm, stream)

    def gather(self, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray, root: int) -> None:
        self._exchange(launch, list(enumerate(outputs)), [(root, array)])

    def scatter(self, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], root: int) -> None:
        self._exchange(launch, [(root, output)], list(enumerate(inputs)))

    def all_to_all(self, launch: Launch, outputs: Sequence[DeviceArray], inputs: Sequence[DeviceArray]) -> None:
        self._exchange(launch, list(enumerate(outputs)), list(enumerate(inputs)))

    def _exchange(self, launch: Launch, incoming: _RankedArrays, outgoing: _RankedArrays) -> None:
        """Receive from, and send to, other ranks; this rank's array for itself is copied on the GPU."""
        with _grouped(self._nccl):
            for call, arrays in (self._nccl.send, outgoing), (self._nccl.recv, incoming):
                for peer, array in arrays:
                    if peer != self.rank and array.nbytes:
                        call(array.pointer, array.nbytes, _UINT8, peer, self.comm, launch.stream)
        output, mine = dict(incoming).get(self.rank), dict(outgoing).get(self.rank)
        if output is not None and mine is not None and mine.pointer != output.pointer:
            runtime.copy_async(output.pointer, mine.pointer, output.nbytes, launch.stream)


class NcclBackend(Backend):
    """Runs calls on arrays on GPUs over NCCL.

    An algorithm takes the Launch and the call's own arguments. The launch's device is current, and it returns once all
    its work is enqueued on the launch's stream.

    Args:
        host: the group's communicator for arrays in host memory, over which the ids of NCCL's communicators travel.
    """

    name: ClassVar[str] = "nccl"
    medium = "nccl"
    device: ClassVar[str] = "cuda"

    def __init__(self, host: Communicator) -> None:
        self._host = host
        self._rank = host.rank
        self._group = host.name
        self._nccl = runtime.nccl()
        self._connections: dict[_Key, _NcclRank] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def algorithm(self, call: Call) -> Algorithm:
        """Return the method with the name of the collective, of this rank's member of a communicator."""
        return functools.partial(self._call, getattr(_NcclRank, call.name))

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        """Enqueue a call, given the Launch, what watches it as a context manager, and the call's own arguments."""
        launch, watched, *own = arguments
        launch.seq, launch.fingerprint = context.seq, context.call.fingerprint
        with runtime.DeviceGuard(launch.device), watched, runtime.cuda_errors(launch.description):
            algorithm(launch, *own)

    def _call(self, method: Callable[..., None], launch: Launch, *own: Any) -> None:
        method(self._connections[(), launch.device], launch, *own)

    def is_connected(self, device: int) -> bool:
        """Return whether the ranks are connected for collectives on arrays on a device."""
        return ((), device) in self._connections

    def connect_all(self, launch: Launch) -> None:
        """Connect all ranks for collectives on arrays on the launch's device; a collective call of the group.

        A rank with arrays on several devices has a communicator for each, which all ranks create in the same order.
        """
        if self.is_connected(launch.device):
            return
        value = exchange.broadcast(self._host, self._new_id(self._rank == 0), "an id of NCCL", launch.deadline)
        self._connect((), range(self._host.size), value, launch)

    # Messages

    def connect(self, launch: Launch, sender: int, receiver: int) -> None:
        """Set up messages from one group rank to another, one of which is this rank; waits for the other."""
        if ((sender, receiver), launch.device) in self._connections:
            return
        ranks, host, lane = sorted((sender, receiver)), self._host, 1 + (sender < receiver)
        if self._rank == ranks[0]:
            value = self._new_id(True)
            exchange.send(host, ranks[1], value, lane, launch.deadline)
        else:
            value = exchange.receive(host, ranks[0], _ID_BYTES, lane, launch.deadline)
        self._connect((sender, receiver), ranks, value, launch)

    def send(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue the send of an array to a group rank."""
        comm, there = self._message_comm(launch, self._rank, peer)
        self._nccl.send(array.pointer, array.nbytes, _UINT8, there, comm, launch.stream)

    def recv(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        """Enqueue the receive of an array from a group rank."""
        comm, there = self._message_comm(launch, peer, self._rank)
        self._nccl.recv(array.pointer, array.nbytes, _UINT8, there, comm, launch.stream)

    def grouped(self) -> AbstractContextManager[None]:
        """Enqueue the calls of a block together at its end, so that none of them waits for another."""
        return _grouped(self._nccl)

    # Ends

    def async_error(self) -> str:
        """Return the error that NCCL itself has detected, '' if there is none. Thread-safe."""
        with self._lock:
            comms = self._comms()
        for comm in comms:
            try:
                status = self._nccl.comm_get_async_error(comm)
            except self._nccl.NCCLError as error:
                return str(error)
            if status not in (0, _IN_PROGRESS):
                return f"{self._nccl.get_error_string(status)}; {self._nccl.get_last_error(comm)}"
        return ""

    def abort(self) -> None:
        """End the kernels in flight; the backend takes no further calls. Thread-safe and idempotent."""
        comms = self._take_comms()
        grouped = len(comms) > 1 and self._nccl.get_version() >= _GROUPED_ABORT_VERSION
        with self.grouped() if grouped else contextlib.nullcontext():
            for comm in comms:
                self._nccl.comm_abort(comm)

    def close(self) -> None:
        comms = self._take_comms()
        if not comms:
            return

        def destroy() -> None:
            for comm in comms:
                self._nccl.comm_destroy(comm)

        try:
            _run_with_deadline(Deadline(_DESTROY_SECONDS), destroy, lambda: None, f"group {self._group!r} ends")
        except CollectiveTimeoutError as error:
            _log.warning("%s; its memory on the GPU is freed when the process ends", error.message)

    def _take_comms(self) -> list[Any]:
        """Remove and return all communicators; no more are created."""
        with self._lock:
            self._aborted = True
            comms = self._comms()
            self._connections.clear()
        return comms

    def _comms(self) -> list[Any]:
        """Return the communicators, in the same order at all ranks. With the lock held."""
        return [member.comm for _, member in sorted(self._connections.items())]

    # Communicators

    def _message_comm(self, launch: Launch, sender: int, receiver: int) -> tuple[Any, int]:
        """Return the communicator of the messages from one rank to another, and the peer's rank in it."""
        # Each direction has its own: a communicator runs its calls in order, and two ranks may both send first.
        member = self._connections[(sender, receiver), launch.device]
        return member.comm, 1 - member.rank

    def _new_id(self, first: bool) -> bytes:
        """Return the id of a new communicator at its first rank, and as many bytes at the others."""
        return bytes(self._nccl.get_unique_id()) if first else bytes(_ID_BYTES)

    def _connect(self, which: tuple[int, ...], ranks: Sequence[int], value: bytes, launch: Launch) -> None:
        """Create this rank's member of a communicator of some ranks, which waits for the other ranks."""
        if self._aborted:
            raise GroupAbortedError(f"group {self._group!r} has ended")
        size, rank, device = len(ranks), list(ranks).index(self._rank), launch.device

        def connect() -> _NcclRank:
            with runtime.DeviceGuard(device), runtime.cuda_errors(why):
                comm = self._nccl.comm_init_rank(size, self._nccl.UniqueId.from_buffer(value), rank)
                return _NcclRank(self._nccl, comm, rank, size)

        def check() -> None:
            error = self._host.failure or self._host.peer_lost_error(ranks, "connect")
            if error is not None:
                raise error

        why = f"{launch.description} in group {self._group!r} connects the GPUs"
        member = _run_with_deadline(launch.deadline, connect, check, why)
        with self._lock:
            self._connections[which, device] = member


def _run_with_deadline(deadline: Deadline, function: Callable[[], T], check: Callable[[], None], purpose: str) -> T:
    """Call a function that cannot be interrupted, in a thread, abandoned if ``check`` raises or at the deadline."""
    future = in_thread("rankmesh-nccl-init", function)
    while not wait([future], _POLL_SECONDS).done:
        check()
        if deadline.expired():
            raise CollectiveTimeoutError(f"{purpose}: NCCL did not connect them within {deadline.seconds:.1f} s")
    return future.result()


@contextlib.contextmanager
def _grouped(nccl: Any) -> Iterator[None]:
    nccl.group_start()
    try:
        yield
    finally:
        nccl.group_end()


def _equal_sizes(arrays: Sequence[DeviceArray]) -> bool:
    """Return whether all arrays have the same size."""
    return all(array.size == arrays[0].size for array in arrays)


def _are_contiguous(arrays: Sequence[DeviceArray]) -> bool:
    """Return whether arrays of the same size are contiguous in memory, in order."""
    nbytes = arrays[0].nbytes
    return all(array.pointer == arrays[0].pointer + row * nbytes for row, array in enumerate(arrays))


def _copy_all(sources: Sequence[DeviceArray], arrays: Sequence[DeviceArray], stream: int) -> None:
    """Copy arrays to others, unless they are the same arrays."""
    if sources is not arrays:
        for source, array in zip(sources, arrays, strict=True):
            runtime.copy_async(array.pointer, source.pointer, array.nbytes, stream)
