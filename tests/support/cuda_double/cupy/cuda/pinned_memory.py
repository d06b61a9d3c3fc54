"""CuPy's pool of pinned memory: what is given back is lent again at once, whatever copies still use it."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from typing import Any

from cupy import _memory

_UNIT = 512
_free: dict[int, list[int]] = defaultdict(list)


class PinnedMemoryPointer:
    """Has a buffer, of at least the bytes asked for."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def size(self) -> int:
        return len(self)  # type: ignore[arg-type]

    def __del__(self) -> None:
        _memory.view(self.ptr, self.size()).fill(_memory.FREED)
        _free[self.size()].append(self.ptr)


def alloc_pinned_memory(size: int) -> Any:
    size = -(-size // _UNIT) * _UNIT
    try:
        ptr = _free[size].pop()
    except IndexError:
        ptr = _memory.allocate(size, None)
    return _of_size(size).from_address(ptr)


@functools.cache
def _of_size(size: int) -> Any:
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_byte * size), {})
