"""One-dimensional, contiguous arrays in GPU memory, of any library, and the current streams of CuPy and of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rankmesh_agent.device import runtime


class CupyStreams:
    """CuPy's current streams."""

    def current(self, device: int) -> int:
        """Return the calling thread's current stream of a device."""
        return runtime.current_stream(device)

    @contextlib.contextmanager
    def using(self, device: int, stream: int) -> Iterator[None]:
        with runtime.DeviceGuard(device), runtime.stream_object(stream):
            yield


class TorchStreams:
    """torch's current streams."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def current(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    @contextlib.contextmanager
    def using(self, device: int, stream: int) -> Iterator[None]:
        library = self._torch.cuda
        with library.device(device), library.stream(library.ExternalStream(stream, device=device)):
            yield


Streams = CupyStreams | TorchStreams
"""Current streams of the library that an array belongs to."""


class DeviceArray:
    """A view of elements in GPU memory, with the part of numpy.ndarray's interface that collectives use.

    Args:
        owner: object that keeps the memory alive.

    Attributes:
        factor: by which PREMUL_SUM multiplies the elements as it reads them; None for 1.
    """

    __slots__ = ("device", "dtype", "factor", "owner", "pointer", "size", "streams")

    ndim = 1

    def __init__(
        self, pointer: int, size: int, dtype: np.dtype[Any], device: int, owner: object, streams: Streams
    ) -> None:
        self.pointer = pointer
        self.size = size
        self.dtype = dtype
        self.device = device
        self.owner = owner
        self.streams = streams
        self.factor: complex | None = None

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        begin, end, _ = part.indices(self.size)
        pointer = self.pointer + begin * self.dtype.itemsize
        size = max(end - begin, 0)
        part_of = DeviceArray(pointer, size, self.dtype, self.device, self.owner, self.streams)
        part_of.factor = self.factor
        return part_of

    def scaled(self, factor: complex) -> DeviceArray:
        """Return the same elements with a factor for PREMUL_SUM."""
        found = self[:]
        found.factor = factor
        return found

    def __setitem__(self, part: slice, other: DeviceArray) -> None:
        """Copy another array into a slice, on the current stream."""
        into = self[part]
        with runtime.DeviceGuard(self.device):
            runtime.copy_async(into.pointer, other.pointer, into.nbytes, self.streams.current(self.device))

    def empty_like(self, size: int | None = None) -> DeviceArray:
        """Return a new array of the same dtype, by default of the same size, for use on the current stream."""
        count = self.size if size is None else size
        with runtime.DeviceGuard(self.device):
            memory = runtime.allocate(max(count * self.dtype.itemsize, 1), self.streams.current(self.device))
        return DeviceArray(memory.ptr, count, self.dtype, self.device, memory, self.streams)

    def copy(self) -> DeviceArray:
        """Return a copy, made on the current stream."""
        made = self.empty_like()
        made[:] = self
        return made

    def overlaps(self, other: DeviceArray) -> bool:
        """Return whether two arrays share a byte."""
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes
