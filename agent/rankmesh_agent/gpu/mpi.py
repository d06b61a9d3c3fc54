"""Backend over a CUDA-aware MPI, which takes addresses of arrays on GPUs; the project's kernel reduces what it cannot.

MPI has no streams. So the host waits until the arrays are complete, and until MPI has moved them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.collectives.reduction import partial_dtype
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.device import runtime
from rankmesh_agent.device.array import DeviceArray
from rankmesh_agent.gpu.backend import GpuBackend
from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.transfers import RankedArrays, TransferCollectives
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.types import datatype, is_native, operation
from rankmesh_agent.wire.errors import CollectiveTimeoutError
from rankmesh_agent.wire.ops import ReduceOp

_PIECE = 1 << 30
"""Largest message, in bytes: MPI counts in C's int."""
_POLL_SECONDS = 0.0001
"""Interval in which the GPU is queried for the end of the work before a call."""


class CudaAwareMpiBackend(TransferCollectives, GpuBackend):
    """Runs calls over a CUDA-aware MPI.

    Args:
        host: the group's backend for host memory, which has the MPI communicator.
    """

    name: ClassVar[str] = "mpi"
    medium = "mpi"

    def __init__(self, host: MpiBackend) -> None:
        self._host = host
        self.rank, self.size = host.comm.rank, host.comm.size
        self._comm: Any = None

    def enqueue(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any], context: CallContext) -> None:
        _wait_for_stream(launch, context)
        self._host.run(self._execute, (algorithm, launch, own), context)

    def _execute(self, algorithm: Algorithm, launch: Launch, own: Sequence[Any]) -> None:
        if self._comm is None:
            self._comm = self._host.comm.Dup()  # keeps this backend's messages apart from the users'
        algorithm(launch, *own)

    # Collectives

    def all_reduce(self, launch: Launch, array: DeviceArray, op: ReduceOp) -> None:
        if self._mpi_reduces(array.dtype, op):
            for piece in _pieces(array):
                into = _buffer(piece), piece.size, datatype(array.dtype)
                self._comm.Allreduce(mpi().IN_PLACE, into, operation(op, array.dtype))
        else:
            super().all_reduce(launch, array, op)

    def broadcast(self, launch: Launch, array: DeviceArray, root: int) -> None:
        for piece in _pieces(array):
            self._comm.Bcast((_buffer(piece), piece.nbytes, mpi().BYTE), root)

    # Parts

    def _mpi_reduces(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether MPI's own arithmetic performs a reduction; operations in Python cannot access GPU memory."""
        own = op is not ReduceOp.AVG and is_native(dtype) and partial_dtype(op, dtype, self.size) == dtype
        return own and bool(operation(op, dtype).is_predefined)

    def scratch(self, launch: Launch, like: DeviceArray) -> list[DeviceArray]:
        rows = super().scratch(launch, like)
        runtime.synchronize_stream(launch.stream)  # earlier work may still use the memory
        return rows

    def exchange(self, launch: Launch, incoming: RankedArrays, outgoing: RankedArrays) -> None:
        comm, byte = self._comm, mpi().BYTE
        requests = [
            begin((_buffer(piece), piece.nbytes, byte), rank)
            for begin, arrays in ((comm.Irecv, incoming), (comm.Isend, outgoing))
            for rank, array in arrays
            for piece in _pieces(array)
        ]
        mpi().Request.Waitall(requests)

    # Ends

    def async_error(self) -> str:
        return ""

    def abort(self) -> None:
        """Do nothing: the host waits, inside MPI, and the MPI watchdog ends that."""

    def close(self) -> None:
        """Do nothing: a communicator cannot be freed where a member may be lost."""


def _wait_for_stream(launch: Launch, context: CallContext) -> None:
    """Wait until the stream has done the work before the call.

    Raises:
        CollectiveTimeoutError: the deadline passed. The MPI watchdog does not detect this, as the rank is not in MPI.
        DistError: the call cannot complete.
    """
    event = runtime.create_event()
    try:
        runtime.record_event(event, launch.stream)
        while not runtime.event_completed(event):
            context.check(list)  # waits for no rank
            if launch.deadline.expired():
                raise CollectiveTimeoutError(
                    f"{launch.description} #{context.seq}: the work before it on the stream did not end within "
                    f"{launch.deadline.seconds:.1f} s",
                    op=context.call.name,
                    seq=context.seq,
                )
            time.sleep(_POLL_SECONDS)
    finally:
        runtime.destroy_event(event)


def _pieces(array: DeviceArray) -> list[DeviceArray]:
    """Return an array as parts that MPI can count."""
    step = _PIECE // array.dtype.itemsize
    return [array[begin : begin + step] for begin in range(0, array.size, step)]


def _buffer(array: DeviceArray) -> Any:
    return mpi().buffer.fromaddress(array.pointer, array.nbytes)
