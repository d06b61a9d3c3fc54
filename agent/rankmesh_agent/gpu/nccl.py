"""NCCL, by way of CuPy: what every rank with a GPU of its own uses.

What NCCL has no reduction for (integers of 16 bits, float8, 'xor', products of complex numbers, averages of integers)
is brought to where it is needed by NCCL and reduced there by our own kernel; everything is moved as bytes. Where NCCL
reduces, the arithmetic is NCCL's: half types are rounded at each step, and MIN and MAX do as its kernels do with NaN.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.device import arithmetic, runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.backend import GpuBackend
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

_log = logging.getLogger("rankmesh")
_UINT8 = 1
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
"""NCCL's numbers of the element types it reduces."""
_OPS = {ReduceOp.SUM: 0, ReduceOp.PREMUL_SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
"""NCCL's numbers of its reductions. PREMUL_SUM adds: the factor has been applied."""
_PAIRS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
_BOOLEAN = {
    ReduceOp.SUM: 2, ReduceOp.MAX: 2, ReduceOp.BOR: 2, ReduceOp.PRODUCT: 3, ReduceOp.MIN: 3, ReduceOp.BAND: 3,
}  # fmt: skip
"""Of bytes that are 0 or 1 'or' is the largest, 'and' the smallest."""
_ADDED = (ReduceOp.SUM, ReduceOp.PREMUL_SUM, ReduceOp.AVG)
_POLL_SECONDS = 0.05
_DESTROY_SECONDS = 30.0
"""How long communicators may take to end in order: they do so together with the other ranks' of their host."""
_GROUPED_ABORT = 22200
"""NCCL's version from which communicators can be aborted together: one by one, the first may wait for the others."""
T = TypeVar("T")
_Key = tuple[tuple[int, ...], tuple[int, ...]]
"""What a communicator is for: the sender and the receiver of messages, or nothing for all ranks; and our devices."""


class _CommRank(NamedTuple):
    """A place in a communicator: this rank's, or one of several it has there, on a GPU each.

    Attributes:
        comm: the communicator.
        rank, size: there.
        several: whether this rank has others; what it does there goes out together.
    """

    comm: Any
    rank: int
    size: int
    several: bool


class _Native:
    """A reduction that NCCL does.

    Attributes:
        type, op: NCCL's numbers.
        width: how many of NCCL's elements one element is.
    """

    def __init__(self, kind: int, op: int, width: int = 1) -> None:
        self.type, self.op, self.width = kind, op, width


def reduces(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Whether NCCL does a reduction by itself."""
    return _native(dtype, op) is not None


def _native(dtype: np.dtype[Any], op: ReduceOp) -> _Native | None:
    """Return how NCCL does a reduction, None if it does not."""
    if dtype == np.bool_:
        return _Native(_UINT8, _BOOLEAN[op]) if op in _BOOLEAN else None
    if dtype in _PAIRS:
        return _Native(_TYPES[_PAIRS[dtype]], _OPS[op], 2) if op in _ADDED else None
    if dtype not in _TYPES or op not in _OPS or (op is ReduceOp.AVG and dtype.kind in "iu"):
        return None
    return _Native(_TYPES[dtype], _OPS[op])


class NcclBackend(GpuBackend):
    """Carries calls out by NCCL.

    Args:
        exchange: how ranks tell each other the ids of communicators.
        rank: this group rank.
        size: ranks in the group.
        group: its name, for people.
    """

    name: ClassVar[str] = "nccl"
    medium = "nccl"
    may_block = True

    def __init__(self, exchange: StoreExchange, rank: int, size: int, group: str) -> None:
        self._exchange = exchange
        self._rank = rank
        self._size = size
        self._group = group
        self._nccl = runtime.nccl()
        self._connections: dict[_Key, list[_CommRank]] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def algorithm(self, call: Call) -> Algorithm:
        """Return what carries out a call; one with a subject has several arrays, each on a GPU of its own."""
        method = _ALGORITHMS[call.kind]
        return functools.partial(self._several if call.subject else self._alone, method)

    def _alone(self, method: Callable[..., None], launch: Launch, *own: Any) -> None:
        (seat,) = self._seats((), (launch.device,), range(self._size), launch)
        method(self, seat, launch, *own)

    def _several(
        self, method: Callable[..., None], first: Launch, launches: Sequence[Launch], each: Sequence[Sequence[Any]]
    ) -> None:
        seats = self._seats((), tuple(launch.device for launch in launches), range(self._size), first)
        with self.grouped():
            for seat, launch, own in zip(seats, launches, each, strict=True):
                with runtime.on_device(launch.device):
                    method(self, seat, launch, *own)

    # Collectives

    def _all_reduce(self, seat: _CommRank, launch: Launch, array: DeviceArray, op: ReduceOp) -> None:
        native = _native(array.dtype, op)
        if native is None:
            parts = self._gathered(seat, launch, array)
            arithmetic.combine(op, parts, [array], launch.stream, launch.device)
            return
        count, pointer = array.size * native.width, array.pointer
        seat.comm.allReduce(pointer, pointer, count, native.type, native.op, launch.stream)

    def _reduce(self, seat: _CommRank, launch: Launch, array: DeviceArray, op: ReduceOp, root: int) -> None:
        native = _native(array.dtype, op)
        if native is None:
            parts = launch.scratch_rows(array, seat.size) if seat.rank == root else []
            self._gather(seat, launch, parts, array, root)
            if parts:
                arithmetic.combine(op, parts, [array], launch.stream, launch.device)
            return
        count, pointer = array.size * native.width, array.pointer
        seat.comm.reduce(pointer, pointer, count, native.type, native.op, root, launch.stream)

    def _broadcast(self, seat: _CommRank, launch: Launch, array: DeviceArray, root: int) -> None:
        pointer = array.pointer
        seat.comm.broadcast(pointer, pointer, array.nbytes, _UINT8, root, launch.stream)

    def _all_gather(self, seat: _CommRank, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray) -> None:
        comm, stream = seat.comm, launch.stream
        # At all ranks or none, unlike where they lie; and what goes out together comes after any copy made here.
        if _alike(outputs) and not seat.several:
            rows = outputs if _neighbours(outputs) else launch.scratch_rows(array, seat.size)
            comm.allGather(array.pointer, rows[0].pointer, array.nbytes, _UINT8, stream)
            _copy_all(rows, outputs, stream)
            return
        with self.grouped():
            for root, output in enumerate(outputs):
                source = array if root == seat.rank else output
                if output.nbytes:
                    comm.broadcast(source.pointer, output.pointer, output.nbytes, _UINT8, root, stream)

    def _gather(
        self, seat: _CommRank, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray, root: int
    ) -> None:
        incoming = list(enumerate(outputs))
        self._transfer(seat, launch, incoming, [(root, array)])

    def _scatter(
        self, seat: _CommRank, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], root: int
    ) -> None:
        self._transfer(seat, launch, [(root, output)], list(enumerate(inputs)))

    def _all_to_all(
        self, seat: _CommRank, launch: Launch, outputs: Sequence[DeviceArray], inputs: Sequence[DeviceArray]
    ) -> None:
        self._transfer(seat, launch, list(enumerate(outputs)), list(enumerate(inputs)))

    def _reduce_scatter(
        self, seat: _CommRank, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], op: ReduceOp
    ) -> None:
        native = _native(output.dtype, op)
        if native is None:
            parts = launch.scratch_rows(output, seat.size)
            self._all_to_all(seat, launch, parts, inputs)
            arithmetic.combine(op, parts, [output], launch.stream, launch.device)
            return
        comm, stream = seat.comm, launch.stream
        if _alike(inputs):
            rows = inputs if _neighbours(inputs) else launch.scratch_rows(output, seat.size)
            _copy_all(inputs, rows, stream)
            count = output.size * native.width
            comm.reduceScatter(rows[0].pointer, output.pointer, count, native.type, native.op, stream)
            return
        with self.grouped():
            for root, part in enumerate(inputs):
                pointer = output.pointer if root == seat.rank else part.pointer
                if part.size:
                    count = part.size * native.width
                    comm.reduce(part.pointer, pointer, count, native.type, native.op, root, stream)

    # Messages

    def connect(self, launch: Launch, sender: int, receiver: int) -> None:
        self._seats((sender, receiver), (launch.device,), sorted((sender, receiver)), launch)

    def send(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        comm, there = self._pair(launch, self._rank, peer)
        comm.send(array.pointer, array.nbytes, _UINT8, there, launch.stream)

    def recv(self, launch: Launch, array: DeviceArray, peer: int) -> None:
        comm, there = self._pair(launch, peer, self._rank)
        comm.recv(array.pointer, array.nbytes, _UINT8, there, launch.stream)

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    # Ends

    def async_error(self) -> str:
        with self._lock:
            comms = self._comms()
        for comm in comms:
            try:
                comm.check_async_error()
            except RuntimeError as error:  # NcclError
                return str(error)
        return ""

    def abort(self) -> None:
        comms = self._taken()
        grouped = len(comms) > 1 and self._nccl.get_version() >= _GROUPED_ABORT
        with self.grouped() if grouped else contextlib.nullcontext():
            for comm in comms:
                comm.abort()

    def close(self) -> None:
        comms = self._taken()
        if not comms:
            return

        def destroy() -> None:
            for comm in comms:
                comm.destroy()

        try:
            _run_with_deadline(Deadline(_DESTROY_SECONDS), destroy, lambda: None, f"group {self._group!r} ends")
        except CollectiveTimeoutError as error:
            _log.warning("%s; the GPU's memory that it had is given back when the process ends", error.message)

    def _taken(self) -> list[Any]:
        """Return the communicators there are, and make no more."""
        with self._lock:
            self._aborted = True
            comms = self._comms()
            self._connections.clear()
        return comms

    def _comms(self) -> list[Any]:
        """Return the communicators in an order that is the same at all ranks. With the lock held."""
        return [seat.comm for _, seats in sorted(self._connections.items()) for seat in seats]

    # Parts

    def _transfer(
        self,
        seat: _CommRank,
        launch: Launch,
        incoming: Sequence[tuple[int, DeviceArray]],
        outgoing: Sequence[tuple[int, DeviceArray]],
    ) -> None:
        """Move arrays from and to ranks, all at once; what is for this rank itself is copied."""
        comm, me, stream = seat.comm, seat.rank, launch.stream
        mine = dict(outgoing).get(me)
        with self.grouped():
            for peer, array in outgoing:
                if peer != me and array.nbytes:
                    comm.send(array.pointer, array.nbytes, _UINT8, peer, stream)
            for peer, array in incoming:
                if peer != me and array.nbytes:
                    comm.recv(array.pointer, array.nbytes, _UINT8, peer, stream)
        for peer, array in incoming:
            if peer == me and mine is not None and mine.pointer != array.pointer:
                runtime.copy_async(array.pointer, mine.pointer, array.nbytes, stream)

    def _gathered(self, seat: _CommRank, launch: Launch, array: DeviceArray) -> list[DeviceArray]:
        parts = launch.scratch_rows(array, seat.size)
        self._all_gather(seat, launch, parts, array)
        return parts

    # Communicators

    def _pair(self, launch: Launch, sender: int, receiver: int) -> tuple[Any, int]:
        """Return the communicator of messages from a rank to another, and the other one's rank there.

        Each way has its own: what is enqueued on one goes out in order, and two ranks may both send first.
        """
        ranks = sorted((sender, receiver))
        (seat,) = self._seats((sender, receiver), (launch.device,), ranks, launch)
        return seat.comm, 1 - seat.rank

    def _seats(
        self, which: tuple[int, ...], devices: tuple[int, ...], ranks: Sequence[int], launch: Launch
    ) -> list[_CommRank]:
        """Return this rank's seats in the communicator of some ranks, one a device; made when it is first needed."""
        seats = self._connections.get((which, devices))
        if seats is not None:
            return seats
        if self._aborted:
            raise GroupAbortedError(f"group {self._group!r} has ended")
        # Ranks make the communicators of the same ranks in the same order, whatever their devices' numbers are.
        with self._lock:
            number = sum(other == which for other, _ in self._connections)
        name = ">".join(map(str, which)) or "all"
        seats = self._connected(f"nccl/{name}/{number}", devices, ranks, launch)
        with self._lock:
            self._connections[which, devices] = seats
        return seats

    def _connected(self, what: str, devices: tuple[int, ...], ranks: Sequence[int], launch: Launch) -> list[_CommRank]:
        """Make a communicator: its first rank has the id, and all tell that they are about to come."""
        own = self._nccl.get_unique_id() if self._rank == ranks[0] else b""
        deadline, why = launch.deadline, f"{launch.description} in group {self._group!r} connects the GPUs"
        self._exchange.publish(what, bytes(own))
        found = self._exchange.gather(what, ranks, deadline, why)[0]
        size, first = len(ranks) * len(devices), list(ranks).index(self._rank) * len(devices)

        def connect() -> list[_CommRank]:
            seats, several = [], len(devices) > 1
            with self.grouped() if several else contextlib.nullcontext():
                for rank, device in enumerate(devices, first):
                    with runtime.on_device(device):
                        seats.append(
                            _CommRank(self._nccl.NcclCommunicator(size, found, rank), rank, size, len(devices) > 1)
                        )
            return seats

        return _run_with_deadline(deadline, connect, lambda: self._exchange.check(ranks), why)


def _run_with_deadline(deadline: Deadline, make: Callable[[], T], check: Callable[[], None], why: str) -> T:
    """Return what a function returns that cannot be interrupted, unless waiting is in vain: then it is left behind.

    Args:
        deadline: when to give up.
        make: the function.
        check: raises if the wait is in vain.
        why: what it is for, for people.

    Raises:
        CollectiveTimeoutError: the deadline passed.
    """
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="rankmesh-nccl-init", daemon=True)
    thread.start()
    while thread.is_alive() and not deadline.expired():
        thread.join(_POLL_SECONDS)
        check()
    if failed:
        raise failed[0]
    if not made:
        raise CollectiveTimeoutError(f"{why}: NCCL did not connect them within {deadline.seconds:.1f} s")
    return made[0]


def _alike(arrays: Sequence[DeviceArray]) -> bool:
    """Whether arrays are as long as each other."""
    return all(array.size == arrays[0].size for array in arrays)


def _neighbours(arrays: Sequence[DeviceArray]) -> bool:
    """Whether arrays that are as long as each other lie behind one another."""
    nbytes = arrays[0].nbytes
    return all(array.pointer == arrays[0].pointer + row * nbytes for row, array in enumerate(arrays))


def _copy_all(sources: Sequence[DeviceArray], arrays: Sequence[DeviceArray], stream: int) -> None:
    """Copy arrays to others, unless they are the same ones."""
    if sources is not arrays:
        for source, array in zip(sources, arrays, strict=True):
            runtime.copy_async(array.pointer, source.pointer, array.nbytes, stream)


_ALGORITHMS: dict[OpType, Callable[..., None]] = {
    OpType.ALL_REDUCE: NcclBackend._all_reduce,
    OpType.REDUCE: NcclBackend._reduce,
    OpType.BROADCAST: NcclBackend._broadcast,
    OpType.ALL_GATHER: NcclBackend._all_gather,
    OpType.GATHER: NcclBackend._gather,
    OpType.SCATTER: NcclBackend._scatter,
    OpType.ALL_TO_ALL: NcclBackend._all_to_all,
    OpType.REDUCE_SCATTER: NcclBackend._reduce_scatter,
}
