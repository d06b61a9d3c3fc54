"""See the package above."""

from cupy.cuda import device, memory, pinned_memory, runtime, stream
from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, MemoryPool, UnownedMemory, alloc
from cupy.cuda.pinned_memory import PinnedMemoryPointer, alloc_pinned_memory
from cupy.cuda.stream import Event, Stream, get_current_stream


def is_available() -> bool:
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False


__all__ = [
    "Device",
    "Event",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_current_stream",
    "is_available",
    "memory",
    "pinned_memory",
    "runtime",
    "stream",
]
