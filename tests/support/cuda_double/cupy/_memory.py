"""What lies at an address: the memory of GPUs, which other processes can map, and pinned memory.

An allocation is an anonymous file. Its handle says where another process finds it: among this one's descriptors.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import threading
from typing import Any

import numpy as np

from cupy._gpus import WITHOUT, CUDARuntimeError, Gpu

FRESH, FREED = 0xA5, 0xDB
"""What memory is filled with that nobody has written to yet, and that somebody gave back."""

_HANDLE_BYTES = 64
_numbers = itertools.count(1)


class Segment:
    """A mapping.

    Args:
        size: bytes asked for.
        gpu: whose memory it is; None for the host's, pinned.
        fd: the file, where it is another process's.

    Attributes:
        number: that no other segment of this process has, or had.
        bytes: all of it, for NumPy.
    """

    def __init__(self, size: int, gpu: Gpu | None, fd: int | None = None) -> None:
        self.number = next(_numbers)
        self.size = size
        self.gpu = gpu
        self.own = fd is None
        self.uses = 1
        self.fd = new_file("memory", size) if fd is None else fd
        self._map = mmap.mmap(self.fd, size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = np.asarray(_Bytes(self.base, size))
        if self.own:
            self.bytes[:] = FRESH

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


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
        self.opened: dict[bytes, Segment] = {}

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
    if segment is None or not segment.own:
        raise CUDARuntimeError(1)
    segment.bytes[:] = FREED  # for the processes that still have it mapped
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


# Between processes


def new_file(what: str, size: int) -> int:
    """Return the descriptor of an anonymous file that another process can open by its handle."""
    fd = os.memfd_create(f"cuda-double-{what}-{os.getpid()}-{next(_numbers)}")
    os.ftruncate(fd, size)
    return fd


def handle_of(fd: int, base: int = 0) -> bytes:
    """Return what another process opens a file with, which is memory from ``base`` on here."""
    if "ipc" in WITHOUT:
        raise CUDARuntimeError(801)
    name = os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)")
    return f"{os.getpid()}/{fd}/{name}/{base:x}".encode().ljust(_HANDLE_BYTES, b"\0")


def open_file(handle: bytes) -> int:
    """Return the descriptor of another process's file.

    Raises:
        CUDARuntimeError: it is this process's own, or not there any more, or IPC is not allowed.
    """
    if "ipc" in WITHOUT:
        raise CUDARuntimeError(801)
    try:
        pid, fd, name, _ = handle.rstrip(b"\0").decode().split("/")
    except ValueError as error:
        raise CUDARuntimeError(1) from error
    if int(pid) == os.getpid():
        raise CUDARuntimeError(201)
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CUDARuntimeError(205) from error
    if name not in os.readlink(f"/proc/self/fd/{opened}"):
        os.close(opened)
        raise CUDARuntimeError(205)
    return opened


def open_segment(handle: bytes, gpu: Gpu) -> int:
    """Map another process's memory; return where. A handle opened twice gives the same address.

    Raises:
        CUDARuntimeError: what was there in the other process before is mapped still; or see open_file.
    """
    with _table.lock:
        segment = _table.opened.get(handle)
        if segment is not None:
            segment.uses += 1
            return segment.base
        if _place(handle) in map(_place, _table.opened):
            raise CUDARuntimeError(208)
        fd = open_file(handle)
        segment = _table.opened[handle] = _table.add(Segment(os.fstat(fd).st_size, gpu, fd))
        return segment.base


def _place(handle: bytes) -> tuple[bytes, bytes]:
    """Return the process and the address that a handle's memory is at."""
    pid, *_, base = handle.rstrip(b"\0").split(b"/")
    return pid, base


def close_segment(base: int) -> None:
    """Undo one open_segment."""
    with _table.lock:
        found = [handle for handle, segment in _table.opened.items() if segment.base == base]
        if not found:
            raise CUDARuntimeError(1)
        segment = _table.opened[found[0]]
        segment.uses -= 1
        if not segment.uses:
            del _table.opened[found[0]]
            _table.remove(base).close()
