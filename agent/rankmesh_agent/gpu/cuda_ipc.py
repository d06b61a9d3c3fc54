"""Backend for ranks that share a GPU, which NCCL refuses: they access each other's memory, mapped by CUDA IPC.

A call has two steps; in each the ranks meet in the host's shared memory. In the first step every rank publishes where
its arrays are, and records an event behind the work that fills them; then it enqueues its share of the call behind the
events of the others. In the second step every rank records an event behind its share, and makes its stream wait for the
events of the others. So only the GPU waits for the GPU, and the host detects missing ranks.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
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
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import ReduceOp

_DESCRIPTOR = struct.Struct("!64sQQ")
"""Location of an array: handle and id of its allocation, and the offset in it."""
_LENGTH = struct.Struct("!q")
_MEMORY_HANDLE_BYTES, _EVENT_HANDLE_BYTES = 64, 64
"""Sizes of CUDA's IPC handles."""
_GRANULARITY = 512
"""Size of the allocation that the handshake maps; allocations of this backend are multiples of it."""
_MAX_MAPPED = 256
"""Largest number of peers' allocations kept mapped. Memory that a peer frees stays in use until it is unmapped."""
_SHARE_ALIGNMENT = 128
"""Shares are multiples of this many bytes, so that the GPU reads all of them with its widest loads."""
_BYTE = np.dtype(np.uint8)
_CLOSE_SECONDS = 5.0
"""Longest wait for the GPU at the end."""
_POLL_SECONDS = 0.0005

_log = logging.getLogger("rankmesh")


class _PeerArrays:
    """Arrays that the ranks published in a call's first step.

    Args:
        backend: maps the peers' memory.
        mine: addresses of this rank's published arrays.
        descriptors: by group rank, the descriptors of the rank's arrays.
    """

    def __init__(self, backend: CudaIpcBackend, mine: Sequence[int], descriptors: Sequence[bytes]) -> None:
        self._backend = backend
        self._mine = mine
        self._descriptors = descriptors

    def address(self, rank: int, number: int) -> int:
        """Return the address in this process of a rank's published array ``number``, which is not empty."""
        if rank == self._backend.rank:
            return self._mine[number]
        begin = number * _DESCRIPTOR.size
        return self._backend.address_of(rank, self._descriptors[rank][begin : begin + _DESCRIPTOR.size])


class _Exported(NamedTuple):
    """A published array: its address here, and its descriptor for the peers."""

    pointer: int
    descriptor: bytes


_EMPTY = _Exported(0, bytes(_DESCRIPTOR.size))
"""For an array without elements."""


class CudaIpcBackend(GpuBackend):
    """Runs calls over memory mapped by CUDA IPC.

    Args:
        host: the group's communicator for host memory; its members share a Segment.
        exchange: through which the ranks exchange the handles of their events.
    """

    name: ClassVar[str] = "cuda-ipc"
    medium = "cuda-ipc"

    def __init__(self, host: Communicator, exchange: StoreExchange) -> None:
        self._host = host
        self._exchange = exchange
        self.rank = host.rank
        self._size = host.size
        self._device = -1
        self._own_events: list[int] = []
        self._peer_events: list[list[int]] = [[], []]
        self._mapped: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._allocations: dict[int, tuple[int, bytes]] = {}
        self._staging = (0, 0)
        self._staging_free = 0
        self._staging_used = False
        self._ends: dict[int, int] = {}
        """By stream, an event behind the latest call on it."""
        self._closed = False

    def handshake(self, device: int, deadline: Deadline) -> str:
        """Open the peers' events, and map memory of theirs once as a probe.

        Returns:
            Why CUDA IPC is unavailable, '' if it is available; the same at all ranks.
        """
        everyone = range(self._size)
        purpose = f"group {self._host.name!r} sets up CUDA IPC"
        probe, mine = 0, b""
        self._device = device
        with runtime.DeviceGuard(device):
            refused = ""
            try:
                probe = runtime.malloc(_GRANULARITY)
                self._own_events = [runtime.create_event(shared=True) for _ in range(2)]
                mine = runtime.memory_handle(probe) + b"".join(map(runtime.event_handle, self._own_events))
            except (RuntimeError, MemoryError) as error:
                refused = f"CUDA IPC is not allowed at rank {self._host.global_ranks[self.rank]} ({error})"
            self._exchange.publish("ipc", mine)
            try:
                handles = self._exchange.gather("ipc", everyone, deadline, purpose)
                if all(handles):
                    refused = refused or self._open_handles(handles)
                self._exchange.publish("ipc-verdict", refused.encode())
                verdicts = self._exchange.gather("ipc-verdict", everyone, deadline, purpose)
            finally:
                if probe:
                    runtime.free(probe)
        verdict = next((value.decode() for value in verdicts if value), "")
        if verdict:
            self.close()
        return verdict

    def _open_handles(self, handles_of: Sequence[bytes]) -> str:
        """Open the handles of all ranks; return the reason of a failure, '' if there is none."""
        try:
            for rank, handles in enumerate(handles_of):
                if rank != self.rank:
                    runtime.close_memory(runtime.open_memory(handles[:_MEMORY_HANDLE_BYTES]))
                    begins = (_MEMORY_HANDLE_BYTES, _MEMORY_HANDLE_BYTES + _EVENT_HANDLE_BYTES)
                    for found, begin in zip(self._peer_events, begins, strict=True):
                        found.append(runtime.open_event(handles[begin : begin + _EVENT_HANDLE_BYTES]))
        except (RuntimeError, MemoryError) as error:
            return f"CUDA IPC is not allowed at rank {self._host.global_ranks[self.rank]} ({error})"
        return ""

    # Calls

    def enqueue(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any], context: CallContext) -> None:
        if launch.device != self._device:
            raise DistBackendError(
                f"{launch.description}: the array is on GPU {launch.device}, but the group uses GPU {self._device} "
                "of this rank, which its ranks share; make another group for another GPU"
            )
        self._staging_used = False
        try:
            self._host.queue.backend.run(algorithm, (launch, *own), context)  # passes the Segment
        finally:
            if launch.stream not in self._ends:
                self._ends[launch.stream] = runtime.create_event()
            runtime.record_event(self._ends[launch.stream], launch.stream)
            if self._staging_used:  # behind the copies to and from it, and the peers' shares
                runtime.record_event(self._staging_free, launch.stream)

    def reduce(
        self, segment: Segment, launch: Launch, array: DeviceArray, op: ReduceOp, root: int | None = None
    ) -> None:
        peers = self._exchange_arrays(segment, launch, [array])
        begin, end = self._share(array)
        if begin < end:
            offset = begin * array.dtype.itemsize
            parts = [peers.address(rank, 0) + offset for rank in range(self._size)]
            outs = parts if root is None else [parts[root]]
            arithmetic.kernels_of(self._device).reduce(op, array.dtype, parts, outs, end - begin, launch.stream)
        self._finish_step(segment, launch)
        if root in (None, self.rank):
            self._copy(launch, array, peers, self.rank, 0)

    all_reduce = reduce

    def broadcast(self, segment: Segment, launch: Launch, array: DeviceArray, root: int) -> None:
        peers = self._exchange_arrays(segment, launch, [array] if self.rank == root else [])
        if self.rank != root:
            self._copy(launch, array, peers, root, 0)
        self._finish_step(segment, launch)

    def gather(
        self, segment: Segment, launch: Launch, outputs: Sequence[DeviceArray], array: DeviceArray, root: int = -1
    ) -> None:
        peers = self._exchange_arrays(segment, launch, [array])
        for rank, output in enumerate(outputs):  # gather has outputs at the root alone
            self._copy(launch, output, peers, rank, 0)
        self._finish_step(segment, launch)

    all_gather = gather

    def scatter(
        self, segment: Segment, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], root: int
    ) -> None:
        peers = self._exchange_arrays(segment, launch, inputs)
        self._copy(launch, output, peers, root, self.rank)
        self._finish_step(segment, launch)

    def reduce_scatter(
        self, segment: Segment, launch: Launch, output: DeviceArray, inputs: Sequence[DeviceArray], op: ReduceOp
    ) -> None:
        peers = self._exchange_arrays(segment, launch, inputs)
        if output.size:
            parts = [peers.address(rank, self.rank) for rank in range(self._size)]
            kernels = arithmetic.kernels_of(self._device)
            kernels.reduce(op, output.dtype, parts, [output.pointer], output.size, launch.stream)
        self._finish_step(segment, launch)

    def all_to_all(
        self, segment: Segment, launch: Launch, outputs: Sequence[DeviceArray], inputs: Sequence[DeviceArray]
    ) -> None:
        lengths = [part.nbytes for part in (*inputs, *outputs)]
        peers = self._exchange_arrays(segment, launch, inputs, lengths)
        for rank, output in enumerate(outputs):
            self._copy(launch, output, peers, rank, self.rank)
        self._finish_step(segment, launch)

    # Steps

    def _exchange_arrays(
        self, segment: Segment, launch: Launch, arrays: Sequence[DeviceArray], lengths: Sequence[int] = ()
    ) -> _PeerArrays:
        """Take the first step: publish arrays, and wait for those of the peers.

        Args:
            segment: the ranks' shared memory.
            launch: the call.
            arrays: the arrays that the peers access.
            lengths: bytes sent to each rank, then bytes expected from each, for comparison between the ranks.

        Raises:
            CallMismatchError: the ranks' calls or lengths differ.
        """
        size = self._size
        room = _LENGTH.size * 2 * size + _DESCRIPTOR.size * size
        if room > segment.slot_bytes:
            raise DistBackendError(f"{size} ranks on one GPU need RANKMESH_SLOT_BYTES={room} at least")
        exported = self._export_all(launch, arrays)
        runtime.record_event(self._own_events[0], launch.stream)
        published = b"".join([*map(_LENGTH.pack, lengths), *(each.descriptor for each in exported)])
        slots = segment.slots(_BYTE, room)
        slots[self.rank].data[: len(published)] = published
        segment.step()
        contents = [slot.tobytes() for slot in slots]
        if lengths:
            _check_lengths([struct.unpack_from(f"!{2 * size}q", each) for each in contents], size)
        self._wait_for_events(0, launch)
        begin = _LENGTH.size * len(lengths)
        return _PeerArrays(self, [each.pointer for each in exported], [each[begin:] for each in contents])

    def _finish_step(self, segment: Segment, launch: Launch) -> None:
        """Take the second step: wait until the peers' shares are done."""
        runtime.record_event(self._own_events[1], launch.stream)
        segment.step()
        self._wait_for_events(1, launch)

    def _wait_for_events(self, step: int, launch: Launch) -> None:
        """Make the stream wait for the peers' events of a step."""
        for event in self._peer_events[step]:
            runtime.stream_wait_event(event, launch.stream)

    def _share(self, array: DeviceArray) -> tuple[int, int]:
        """Return the first element of this rank's share of an array, and the first one behind it."""
        step = max(_SHARE_ALIGNMENT // array.dtype.itemsize, 1)
        share = -(-array.size // (self._size * step)) * step
        return min(self.rank * share, array.size), min((self.rank + 1) * share, array.size)

    def _copy(self, launch: Launch, out: DeviceArray, peers: _PeerArrays, rank: int, number: int) -> None:
        """Enqueue a copy of a rank's published array, of the length of ``out``, unless it is ``out``."""
        if out.size and (source := peers.address(rank, number)) != out.pointer:
            runtime.copy_async(out.pointer, source, out.nbytes, launch.stream)

    # Memory

    def _export_all(self, launch: Launch, arrays: Sequence[DeviceArray]) -> list[_Exported]:
        """Return descriptors of arrays, or of copies in staging memory where an array has no IPC handle."""
        try:
            return [self._export(array.pointer) if array.size else _EMPTY for array in arrays]
        except DistBackendError:
            pass
        # Memory of the driver's pools, or mapped by virtual memory management, has no handle of this kind.
        exported, begin = [], 0
        base = self._staging_memory(sum(_round_up(array.nbytes) for array in arrays), launch.stream)
        for array in arrays:
            if not array.size:
                exported.append(_EMPTY)
                continue
            runtime.copy_async(base + begin, array.pointer, array.nbytes, launch.stream)
            exported.append(self._export(base + begin))
            begin += _round_up(array.nbytes)
        return exported

    def _export(self, pointer: int) -> _Exported:
        number = runtime.allocation_id(pointer)
        found = self._allocations.get(number)
        if found is None:
            with runtime.CudaErrors("its memory cannot be shared with other processes"):
                base = runtime.allocation_base(pointer)
                found = base, runtime.memory_handle(base)
            if len(self._allocations) >= _MAX_MAPPED:
                self._allocations.clear()
            self._allocations[number] = found
        base, handle = found
        return _Exported(pointer, _DESCRIPTOR.pack(handle, number, pointer - base))

    def _staging_memory(self, nbytes: int, stream: int) -> int:
        """Return the address of ``nbytes`` of memory with an IPC handle; it is kept for later calls.

        The stream waits until the previous call that used it, maybe on another stream, is over at all ranks.
        """
        pointer, room = self._staging
        if room < nbytes:
            if pointer:
                runtime.synchronize_device()
                runtime.free(pointer)
            room = _round_up(nbytes)
            self._staging = runtime.malloc(room), room
        self._staging_free = self._staging_free or runtime.create_event()
        runtime.stream_wait_event(self._staging_free, stream)
        self._staging_used = True
        return self._staging[0]

    def address_of(self, rank: int, descriptor: bytes) -> int:
        """Return the address in this process of another rank's array."""
        handle, number, offset = _DESCRIPTOR.unpack(descriptor)
        base = self._mapped.get((rank, number))
        if base is None:
            while len(self._mapped) >= _MAX_MAPPED:
                runtime.synchronize_device()
                runtime.close_memory(self._mapped.popitem(last=False)[1])
            base = self._mapped[rank, number] = self._map(rank, handle)
        else:
            self._mapped.move_to_end((rank, number))
        return int(base + offset)

    def _map(self, rank: int, handle: bytes) -> int:
        """Map another rank's allocation."""
        with runtime.CudaErrors(f"memory of rank {self._host.global_ranks[rank]} on the GPU cannot be mapped"):
            try:
                return runtime.open_memory(handle)
            except RuntimeError:
                # It may lie where the rank has freed an allocation that is still mapped here.
                runtime.synchronize_device()
                for key in [key for key in self._mapped if key[0] == rank]:
                    runtime.close_memory(self._mapped.pop(key))
                return runtime.open_memory(handle)

    # Ends

    def async_error(self) -> str:
        return ""

    def abort(self) -> None:
        """Do nothing: no kernel waits for another rank.

        A stream may wait, for the event of a rank that died before its GPU reached it. CUDA cannot end such a wait, and
        does not document whether the end of the event's process does.
        """

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with runtime.DeviceGuard(self._device):
            if not self._is_idle():
                return
            for base in self._mapped.values():
                runtime.close_memory(base)
            self._mapped.clear()
            for events in (self._own_events, *self._peer_events, self._ends.values()):
                for event in events:
                    runtime.destroy_event(event)
            if self._staging_free:
                runtime.destroy_event(self._staging_free)
            if self._staging[0]:
                runtime.free(self._staging[0])

    def _is_idle(self) -> bool:
        """Return whether the GPU has completed the calls, which access the peers' memory; wait a while for that."""
        deadline = Deadline(_CLOSE_SECONDS)
        try:
            while not all(map(runtime.event_completed, self._ends.values())):
                if deadline.expired():
                    raise DistBackendError(f"its calls did not end on the GPU within {_CLOSE_SECONDS:g} s")
                time.sleep(_POLL_SECONDS)
        except DistBackendError as error:
            name = self._host.name
            _log.warning("group %r: %s; its memory on the GPU is freed when the process ends", name, error.message)
            return False
        return True


def _check_lengths(table: Sequence[tuple[int, ...]], size: int) -> None:
    """Raise CallMismatchError if the bytes that a rank sends to a peer differ from those that the peer expects."""
    for rank in range(size):
        for peer in range(size):
            if table[rank][peer] != table[peer][size + rank]:
                raise CallMismatchError


def _round_up(nbytes: int) -> int:
    return max(-(-nbytes // _GRANULARITY), 1) * _GRANULARITY
