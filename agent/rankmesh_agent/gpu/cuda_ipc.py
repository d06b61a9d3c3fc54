"""Ranks that share a GPU, which NCCL refuses: they read and write each other's memory, mapped by CUDA IPC.

A call has two steps, in which the ranks meet in the host's shared memory. In the first each shows where its arrays are,
and an event that has happened on the GPU once what they are filled with has been computed; then each enqueues its share
behind the others' events. In the second each shows an event that has happened once its share is done; what comes on a
rank's stream waits for all of them. So nobody waits for a GPU but the GPU itself, and the host knows who did not come.
"""

from __future__ import annotations

import functools
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.device import arithmetic, runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.backend import GpuBackend
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.transports.segment import CallMismatchError, Segment
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

_SHOWN = struct.Struct("!64sQQ")
"""Where an array is: its allocation's handle and number, and how far behind that's beginning."""
_LENGTH = struct.Struct("!q")
_MEMORY, _EVENT = 64, 64
"""Bytes of CUDA's handles."""
_LEAST_BYTES = 512
"""What an allocation is made of for the first meeting."""
_MAX_MAPPED = 256
"""Allocations of others that are kept mapped; memory that its rank has freed goes when it is not among them."""
_ALIGNED = 128
"""Bytes that shares are multiples of, so that all are read as wide as the GPU can."""
_BYTE = np.dtype(np.uint8)


class _Met:
    """What the ranks showed in a call's first step.

    Args:
        backend: maps others' memory.
        mine: the addresses of this rank's arrays that the others see.
        shown: what each rank showed of its arrays.
    """

    def __init__(self, backend: CudaIpcBackend, mine: Sequence[int], shown: Sequence[bytes]) -> None:
        self._backend = backend
        self._mine = mine
        self._shown = shown

    def of(self, rank: int, number: int, like: DeviceArray) -> DeviceArray:
        """Return a rank's array, which is like another one."""
        backend = self._backend
        begin = number * _SHOWN.size
        if rank == backend.rank:
            pointer = self._mine[number]
        elif not like.size:
            pointer = 0
        else:
            pointer = backend.address_of(rank, self._shown[rank][begin : begin + _SHOWN.size])
        return DeviceArray(pointer, like.size, like.dtype, like.device, self, like.streams)


class _Place(NamedTuple):
    """Where an array is that others may see."""

    pointer: int
    shown: bytes


_NOWHERE = _Place(0, bytes(_SHOWN.size))
"""Of an array without elements."""


class CudaIpcBackend(GpuBackend):
    """Carries calls out over memory that is mapped by CUDA IPC.

    Args:
        host: the group's calls on arrays in host memory; the members share a Segment.
        exchange: how ranks tell each other the handles of their events.
    """

    name: ClassVar[str] = "cuda-ipc"
    medium = "cuda-ipc"

    def __init__(self, host: Communicator, exchange: StoreExchange) -> None:
        self._host = host
        self._exchange = exchange
        self._rank = host.rank
        self._size = host.size
        self._device = -1
        self._own: list[int] = []
        self._events: list[list[int]] = [[], []]
        self._mapped: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._handles: dict[int, bytes] = {}
        self._staging = (0, 0)
        self._staged_done = 0
        self._staged_now = False
        self._closed = False

    @property
    def rank(self) -> int:
        """This group rank."""
        return self._rank

    def handshake(self, device: int, deadline: Deadline) -> str:
        """Open each other's events, and memory for once; return why that is not to be had, the same at all ranks."""
        everyone = range(self._size)
        why = f"group {self._host.name!r} meets on a GPU"
        probe, mine = 0, b""
        self._device = device
        with runtime.on_device(device):
            refused = ""
            try:
                probe = runtime.malloc(_LEAST_BYTES)
                self._own = [runtime.create_event(shared=True) for _ in range(2)]
                mine = runtime.memory_handle(probe) + b"".join(map(runtime.event_handle, self._own))
            except (RuntimeError, MemoryError) as error:
                refused = f"CUDA IPC is not allowed at rank {self._host.global_ranks[self._rank]} ({error})"
            self._exchange.publish("ipc", mine)
            try:
                shown = self._exchange.gather("ipc", everyone, deadline, why)
                if all(shown):
                    refused = refused or self._opened(shown)
                self._exchange.publish("ipc-verdict", refused.encode())
                verdicts = self._exchange.gather("ipc-verdict", everyone, deadline, why)
            finally:
                if probe:
                    runtime.free(probe)
        verdict = next((said.decode() for said in verdicts if said), "")
        if verdict:
            self.close()
        return verdict

    def _opened(self, shown: Sequence[bytes]) -> str:
        """Open what the others show; return why that failed."""
        try:
            for rank, handles in enumerate(shown):
                if rank == self._rank:
                    events = self._own
                else:
                    runtime.close_memory(runtime.open_memory(handles[:_MEMORY]))
                    begins = (_MEMORY, _MEMORY + _EVENT)
                    events = [runtime.open_event(handles[begin : begin + _EVENT]) for begin in begins]
                for found, event in zip(self._events, events, strict=True):
                    found.append(event)
        except (RuntimeError, MemoryError) as error:
            return f"CUDA IPC is not allowed at rank {self._host.global_ranks[self._rank]} ({error})"
        return ""

    # Calls

    def algorithm(self, call: Call) -> Algorithm:
        return functools.partial(_ALGORITHMS[call.kind], self)

    def enqueue(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any], watch: CallContext) -> None:
        if launch.device != self._device:
            raise DistBackendError(
                f"{launch.description}: the array is on GPU {launch.device}, but the group met with those on GPU "
                f"{self._device} of this rank, which its ranks share; make another group for another GPU"
            )
        self._staged_now = False
        try:
            self._host.queue.backend.run(algorithm, (launch, *own), watch)
        finally:
            if self._staged_now:  # behind its copies there and back, and the others' shares
                runtime.record_event(self._staged_done, launch.stream)

    def _all_reduce(self, segment: Segment, launch: Launch, array: DeviceArray, op: ReduceOp) -> None:
        met = self._met(segment, launch, [array])
        share = self._share(array)
        parts = [met.of(rank, 0, array)[share] for rank in range(self._size)]
        arithmetic.combine(op, parts, parts, launch.stream, self._device)
        self._parted(segment, launch)
        self._copy(launch, array, met.of(self._rank, 0, array))

    def _reduce(self, segment: Segment, launch: Launch, array: DeviceArray, op: ReduceOp, root: int) -> None:
        met = self._met(segment, launch, [array])
        share = self._share(array)
        parts = [met.of(rank, 0, array)[share] for rank in range(self._size)]
        arithmetic.combine(op, parts, [parts[root]], launch.stream, self._device)
        self._parted(segment, launch)
        if self._rank == root:
            self._copy(launch, array, met.of(root, 0, array))

    def _broadcast(self, segment: Segment, launch: Launch, array: DeviceArray, root: int) -> None:
        met = self._met(segment, launch, [array] if self._rank == root else [])
        if self._rank != root:
            self._copy(launch, array, met.of(root, 0, array))
        self._parted(segment, launch)

    def _gather(
        self, segment: Segment, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray, root: int = -1
    ) -> None:
        met = self._met(segment, launch, [array])
        for rank, output in enumerate(outputs):  # of gather, there are some at the root alone
            self._copy(launch, output, met.of(rank, 0, output))
        self._parted(segment, launch)

    def _scatter(
        self, segment: Segment, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], root: int
    ) -> None:
        met = self._met(segment, launch, inputs)
        self._copy(launch, output, met.of(root, self._rank, output))
        self._parted(segment, launch)

    def _reduce_scatter(
        self, segment: Segment, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], op: ReduceOp
    ) -> None:
        met = self._met(segment, launch, inputs)
        parts = [met.of(rank, self._rank, output) for rank in range(self._size)]
        arithmetic.combine(op, parts, [output], launch.stream, self._device)
        self._parted(segment, launch)

    def _all_to_all(
        self, segment: Segment, launch: Launch, outputs: Sequence[DeviceArray], inputs: Sequence[DeviceArray]
    ) -> None:
        lengths = [part.nbytes for part in (*inputs, *outputs)]
        met = self._met(segment, launch, inputs, lengths)
        for rank, output in enumerate(outputs):
            self._copy(launch, output, met.of(rank, self._rank, output))
        self._parted(segment, launch)

    # Steps

    def _met(
        self, segment: Segment, launch: Launch, arrays: Sequence[DeviceArray], lengths: Sequence[int] = ()
    ) -> _Met:
        """Take the first step.

        Args:
            segment: where the ranks meet.
            launch: the call.
            arrays: which the others may see.
            lengths: bytes of what is for each rank, and of what is expected from each, which have to fit together.

        Raises:
            CallMismatchError: the ranks' calls, or lengths, do not fit together.
        """
        size = self._size
        room = _LENGTH.size * 2 * size + _SHOWN.size * size
        if room > segment.slot_bytes:
            raise DistBackendError(f"{size} ranks on one GPU need RANKMESH_SLOT_BYTES={room} at least")
        places = self._places(launch, arrays)
        runtime.record_event(self._own[0], launch.stream)
        said = b"".join([*map(_LENGTH.pack, lengths), *(place.shown for place in places)])
        slots = segment.slots(_BYTE, room)
        slots[self._rank][: len(said)] = np.frombuffer(said, np.uint8)
        segment.step()
        shown = [slot.tobytes() for slot in slots]
        if lengths:
            _compare([struct.unpack_from(f"!{2 * size}q", each) for each in shown], size)
        self._follow(self._events[0], launch)
        begin = _LENGTH.size * len(lengths)
        return _Met(self, [place.pointer for place in places], [each[begin:] for each in shown])

    def _parted(self, segment: Segment, launch: Launch) -> None:
        """Take the second step."""
        runtime.record_event(self._own[1], launch.stream)
        segment.step()
        self._follow(self._events[1], launch)

    def _follow(self, events: Sequence[int], launch: Launch) -> None:
        """Have the stream wait for the other ranks' events."""
        for rank, event in enumerate(events):
            if rank != self._rank:
                runtime.stream_wait_event(event, launch.stream)

    def _share(self, array: DeviceArray) -> slice:
        """Return this rank's share of an array."""
        step = max(_ALIGNED // array.dtype.itemsize, 1)
        share = -(-array.size // (self._size * step)) * step
        return slice(min(self._rank * share, array.size), min((self._rank + 1) * share, array.size))

    def _copy(self, launch: Launch, out: DeviceArray, array: DeviceArray) -> None:
        if out.pointer != array.pointer:
            runtime.copy_async(out.pointer, array.pointer, out.nbytes, launch.stream)

    # Memory

    def _places(self, launch: Launch, arrays: Sequence[DeviceArray]) -> list[_Place]:
        """Return where arrays are that the others may see: in memory of ours, where theirs cannot be shown."""
        try:
            return [self._place(array.pointer) if array.size else _NOWHERE for array in arrays]
        except DistBackendError:
            pass
        # Memory of a pool of the driver's, or mapped piece by piece, has no handle of this kind.
        places, begin = [], 0
        base = self._staged(sum(_aligned(array.nbytes) for array in arrays), launch.stream)
        for array in arrays:
            if not array.size:
                places.append(_NOWHERE)
                continue
            runtime.copy_async(base + begin, array.pointer, array.nbytes, launch.stream)
            places.append(self._place(base + begin))
            begin += _aligned(array.nbytes)
        return places

    def _place(self, pointer: int) -> _Place:
        allocation = runtime.allocation_of(pointer)
        handle = self._handles.get(allocation.id)
        if handle is None:
            with runtime.cuda_errors("its memory cannot be shown to other processes"):
                handle = runtime.memory_handle(allocation.base)
            if len(self._handles) >= _MAX_MAPPED:
                self._handles.clear()
            self._handles[allocation.id] = handle
        return _Place(pointer, _SHOWN.pack(handle, allocation.id, pointer - allocation.base))

    def _staged(self, nbytes: int, stream: int) -> int:
        """Return the address of so many bytes in memory of ours that the others may see, which is kept.

        It is the stream's from where the latest call that had it, on another stream maybe, is over at all ranks.
        """
        pointer, room = self._staging
        if room < nbytes:
            if pointer:
                runtime.synchronize_device()
                runtime.free(pointer)
            room = _aligned(nbytes)
            self._staging = runtime.malloc(room), room
        self._staged_done = self._staged_done or runtime.create_event()
        runtime.stream_wait_event(self._staged_done, stream)
        self._staged_now = True
        return self._staging[0]

    def address_of(self, rank: int, shown: bytes) -> int:
        """Return the address of another rank's array here."""
        handle, number, offset = _SHOWN.unpack(shown)
        base = self._mapped.get((rank, number))
        if base is None:
            while len(self._mapped) >= _MAX_MAPPED:
                runtime.synchronize_device()
                runtime.close_memory(self._mapped.popitem(last=False)[1])
            base = self._mapped[rank, number] = self._open(rank, handle)
        else:
            self._mapped.move_to_end((rank, number))
        return int(base + offset)

    def _open(self, rank: int, handle: bytes) -> int:
        """Map an allocation of another rank's."""
        with runtime.cuda_errors(f"memory of rank {self._host.global_ranks[rank]} on the GPU cannot be mapped"):
            try:
                return runtime.open_memory(handle)
            except RuntimeError:
                # It may lie where something was that the rank has freed, and that is mapped here still.
                runtime.synchronize_device()
                for key in [key for key in self._mapped if key[0] == rank]:
                    runtime.close_memory(self._mapped.pop(key))
                return runtime.open_memory(handle)

    # Ends

    def async_error(self) -> str:
        return ""

    def abort(self) -> None:
        """Nothing to end: no kernel waits for another rank.

        A stream may, for the event of one that died before the GPU came to it. CUDA has no way to end that, and does
        not say whether the end of the event's process does.
        """

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with runtime.on_device(self._device):
            for base in self._mapped.values():
                runtime.close_memory(base)
            self._mapped.clear()
            for events in self._events:
                for event in events:
                    runtime.destroy_event(event)
            if self._staged_done:
                runtime.destroy_event(self._staged_done)
            if self._staging[0]:
                runtime.free(self._staging[0])


def _compare(table: Sequence[tuple[int, ...]], size: int) -> None:
    """Raise CallMismatchError if a rank has another length for a peer than that expects."""
    for rank in range(size):
        for peer in range(size):
            if table[rank][peer] != table[peer][size + rank]:
                raise CallMismatchError


def _aligned(nbytes: int) -> int:
    return max(-(-nbytes // _LEAST_BYTES), 1) * _LEAST_BYTES


_ALGORITHMS: dict[OpType, Callable[..., None]] = {
    OpType.ALL_REDUCE: CudaIpcBackend._all_reduce,
    OpType.REDUCE: CudaIpcBackend._reduce,
    OpType.BROADCAST: CudaIpcBackend._broadcast,
    OpType.ALL_GATHER: CudaIpcBackend._gather,
    OpType.GATHER: CudaIpcBackend._gather,
    OpType.SCATTER: CudaIpcBackend._scatter,
    OpType.ALL_TO_ALL: CudaIpcBackend._all_to_all,
    OpType.REDUCE_SCATTER: CudaIpcBackend._reduce_scatter,
}
