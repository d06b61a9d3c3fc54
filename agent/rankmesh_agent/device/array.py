"""One-dimensional, contiguous arrays in a GPU's memory, whoever's they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from rankmesh_agent.device import runtime


class Streams(Protocol):
    """Whose idea of the current stream counts for an array: CuPy's, or torch's."""

    def current(self, device: int) -> int:
        """Return the thread's current stream of a device."""

    def using(self, device: int, stream: int) -> AbstractContextManager[object]:
        """Make a stream the thread's current one for a while, of a device that becomes the current one, too."""


class DeviceArray:
    """A view of elements in a GPU's memory, with as much of numpy.ndarray's interface as collectives need.

    Args:
        pointer: address of the first element.
        size: number of elements.
        dtype: their type.
        device: number of the GPU in this process.
        owner: what keeps the memory.
        streams: whose current stream counts.
    """

    __slots__ = ("device", "dtype", "owner", "pointer", "size", "streams")

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

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        begin, end, _ = part.indices(self.size)
        pointer = self.pointer + begin * self.dtype.itemsize
        return DeviceArray(pointer, max(end - begin, 0), self.dtype, self.device, self.owner, self.streams)

    def __setitem__(self, part: slice, other: DeviceArray) -> None:
        """Copy another array's elements to some here, on the current stream."""
        into = self[part]
        with runtime.on_device(self.device):
            runtime.copy_async(into.pointer, other.pointer, into.nbytes, self.streams.current(self.device))

    def empty_like(self, size: int | None = None) -> DeviceArray:
        """Return memory for ``size`` such elements, as many as here by default, for the current stream's use."""
        count = self.size if size is None else size
        with runtime.on_device(self.device):
            memory = runtime.allocate(max(count * self.dtype.itemsize, 1), self.streams.current(self.device))
        return DeviceArray(memory.ptr, count, self.dtype, self.device, memory, self.streams)

    def copy(self) -> DeviceArray:
        """Return a copy, made on the current stream."""
        made = self.empty_like()
        made[:] = self
        return made

    def overlaps(self, other: DeviceArray) -> bool:
        """Whether two arrays have a byte in common."""
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes
