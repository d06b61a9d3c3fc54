"""CuPy's memory pool: what is given back is lent again at once, for the same stream's use."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from cupy import _gpus, _memory, _streams
from cupy.cuda import runtime, stream

_UNIT = 512
_CHUNK = 2 << 20
"""What the pool takes from the runtime at least: an array lies somewhere in an allocation, as in real pools."""


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr = ptr
        self.size = size
        self.device_id = _gpus.gpu().number if device_id < 0 else device_id
        self._owner = owner


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Any:
        from cupy.cuda.device import Device

        return Device(self.device_id)

    def __int__(self) -> int:
        return int(self.ptr)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


class _Lent:
    """A block of the pool, in use."""

    def __init__(self, pool: MemoryPool, arena: _Arena, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self.device_id = arena.gpu.number
        self._home = pool, arena

    def __del__(self) -> None:
        pool, arena = self._home
        ptr, size = self.ptr, self.size
        _streams.given_back.append(lambda: pool._take_back(arena, ptr, size))


class _Arena:
    """The blocks of a stream."""

    def __init__(self, queue: _streams.Queue) -> None:
        self.queue = queue
        self.gpu = queue.gpu
        self.free: dict[int, list[int]] = defaultdict(list)
        self.rest = range(0)


class MemoryPool:
    def __init__(self) -> None:
        self._arenas: dict[_streams.Queue, _Arena] = {}
        self._chunks: dict[int, int] = {}
        self._used = 0
        self._lock = threading.RLock()

    def malloc(self, size: int) -> MemoryPointer:
        if size == 0:
            return MemoryPointer(UnownedMemory(0, 0, None), 0)
        _streams.tidy()
        queue = _streams.stream(stream.get_current_stream().ptr)
        size = max(_UNIT, 1 << (size - 1).bit_length())
        with self._lock:
            arena = self._arenas.setdefault(queue, _Arena(queue))
            free = arena.free[size]
            ptr = free.pop() if free else self._carve(arena, size)
            self._used += size
        return MemoryPointer(_Lent(self, arena, ptr, size), 0)

    def _carve(self, arena: _Arena, size: int) -> int:
        if len(arena.rest) < size:
            chunk = max(size, _CHUNK)
            try:
                base = runtime.malloc(chunk)
            except runtime.CUDARuntimeError as error:
                if error.status != 2:
                    raise
                raise OutOfMemoryError(size, self.total_bytes()) from error
            self._chunks[base] = chunk
            arena.rest = range(base, base + chunk)
        ptr, arena.rest = arena.rest[0], arena.rest[size:]
        return ptr

    def _take_back(self, arena: _Arena, ptr: int, size: int) -> None:
        if not arena.queue.closed:  # the next user of this stream writes there, as soon as the stream gets to it
            arena.queue.put(lambda: _memory.view(ptr, size).fill(_memory.FREED))
        with self._lock:  # only now: that user, in another thread, may come at once, and what it writes comes later
            self._used -= size
            arena.free[size].append(ptr)

    def used_bytes(self) -> int:
        _streams.tidy()
        return self._used

    def total_bytes(self) -> int:
        return sum(self._chunks.values())

    def free_all_blocks(self, stream: object = None) -> None:
        """Give back what can be: all, if nothing is in use."""
        if self.used_bytes() == 0:
            for base in self._chunks:
                runtime.free(base)
            self._chunks.clear()
            self._arenas.clear()


_pool = MemoryPool()


def alloc(size: int) -> MemoryPointer:
    return _pool.malloc(size)
