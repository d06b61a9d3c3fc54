"""What lies at an address: the memory of GPUs, and pinned memory."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
from typing import Any

import numpy as np

from cupy._gpus import CUDARuntimeError, Gpu

FRESH, FREED = 0xA5, 0xDB
"""What memory is filled with that nobody has written to yet, and that somebody gave back."""


class Segment:
    """A mapping.

    Args:
        size: bytes asked for.
        gpu: whose memory it is; None for the host's, pinned.

    Attributes:
        bytes: all of it, for NumPy.
    """

    def __init__(self, size: int, gpu: Gpu | None) -> None:
        self.size = size
        self.gpu = gpu
        self._map = mmap.mmap(-1, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = np.asarray(_Bytes(self.base, size))
        self.bytes[:] = FRESH

    def close(self) -> None:
        self._map.close()


class _Bytes:
    """Tells NumPy of bytes at an address, without a reference that would keep them mapped."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class _Table:
    """The segments by their addresses."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bases: list[int] = []
        self.segments: dict[int, Segment] = {}

    def add(self, segment: Segment) -> Segment:
        with self.lock:
            bisect.insort(self.bases, segment.base)
            self.segments[segment.base] = segment
        return segment

    def remove(self, base: int) -> Segment:
        with self.lock:
            self.bases.remove(base)
            return self.segments.pop(base)


_table = _Table()


def allocate(size: int, gpu: Gpu | None) -> int:
    """Return the address of new memory, of a GPU or the host.

    Raises:
        CUDARuntimeError: there is not as much left.
    """
    if gpu is not None:
        if gpu.used + size > gpu.capacity:
            raise CUDARuntimeError(2)
        gpu.used += size
    return _table.add(Segment(size, gpu)).base


def release(base: int) -> None:
    """Give back what allocate returned, to which nobody refers any more."""
    segment = _table.segments.get(base)
    if segment is None:
        raise CUDARuntimeError(1)
    if segment.gpu is not None:
        segment.gpu.used -= segment.size
    _table.remove(base).close()


def find(address: int, size: int = 1) -> Segment | None:
    """Return the segment that all these bytes lie in; None for the host's usual memory, or nobody's."""
    with _table.lock:
        place = bisect.bisect_right(_table.bases, address)
        segment = _table.segments[_table.bases[place - 1]] if place else None
    return segment if segment is not None and address + size <= segment.base + segment.size else None


def view(
    address: int, shape: tuple[int, ...] | int, dtype: Any = np.uint8, strides: tuple[int, ...] | None = None
) -> np.ndarray[Any, Any]:
    """Return what lies at an address, as a NumPy array that does not keep it.

    Raises:
        CUDARuntimeError: there is no such memory.
    """
    segment = find(address)
    if segment is None:
        if np.prod(shape) == 0:
            return np.empty(shape, dtype)
        raise CUDARuntimeError(700)
    try:
        return np.ndarray(shape, dtype, segment.bytes, address - segment.base, strides)
    except (TypeError, ValueError) as error:
        raise CUDARuntimeError(700) from error
