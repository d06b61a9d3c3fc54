"""The GPUs of this process, and which is the thread's current one."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupy._streams import Queue

WITHOUT = frozenset(filter(None, os.environ.get("CUDA_DOUBLE_WITHOUT", "").split(",")))
"""What is to be missing: ``nccl``."""
_CAPACITY = int(os.environ.get("CUDA_DOUBLE_MEMORY", 8 << 30))

_TEXTS = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
}


class CUDARuntimeError(RuntimeError):
    """What the runtime's functions raise."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_TEXTS[status])


class Gpu:
    """A GPU.

    Args:
        number: in this process.
        name: which GPU of the machine it is; the same for processes that share it. Instances of one (MIG) have what is
            before a slash in common.

    Attributes:
        bus: where it is on the machine's bus.
        context: whether this process uses it, which takes memory there.
        queues: its streams; the first is the legacy default one.
        used: bytes of its memory that this process has allocated.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.uuid = hashlib.sha256(name.encode()).digest()[:16]
        place = hashlib.sha256(name.partition("/")[0].encode()).hexdigest()
        self.bus = f"0000:{place[:2]}:{place[2:4]}.0"
        self.context = False
        self.capacity = _CAPACITY
        self.queues: list[Queue] = []
        self.used = 0


GPUS = [Gpu(*named) for named in enumerate(filter(None, os.environ.get("CUDA_DOUBLE_GPUS", "").split(",")))]


class _Current(threading.local):
    number = 0


_current = _Current()


def gpu(number: int | None = None) -> Gpu:
    """Return a GPU, by default the thread's current one."""
    if not GPUS:
        raise CUDARuntimeError(100)
    number = _current.number if number is None else number
    if not 0 <= number < len(GPUS):
        raise CUDARuntimeError(101)
    return GPUS[number]


def use(number: int) -> None:
    """Make a GPU, and its context, the thread's current one."""
    _current.number = gpu(number).number
    touch()


def touch() -> None:
    """Do what all but a few functions of the runtime do first: make a context on the current GPU."""
    gpu().context = True
