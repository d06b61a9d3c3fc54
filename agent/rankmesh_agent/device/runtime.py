"""NVIDIA's GPUs, by way of CuPy: the only place that touches its runtime.

Memory, streams and events are the numbers that CUDA knows them by. Every function that makes something, or launches
something, does so on the thread's current device: ``on_device`` sets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rankmesh_agent.wire.errors import DistBackendError

_INSTALL = "pip install 'rankmesh[gpu]' (CuPy for CUDA 12)"
_NO_TIMING, _INTERPROCESS = 2, 4
_NON_BLOCKING = 1
_LAZY_PEER_ACCESS = 1
_DEFAULT_KIND = 4
"""cudaMemcpyDefault: the runtime sees from the addresses which way a copy goes."""
_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID."""
_NOT_READY = 600
"""cudaErrorNotReady."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OURS = "rankmesh-"
"""How the names of threads of ours begin."""


class _Thread(threading.local):
    """A thread, as far as GPUs go: whether it has been on one by way of on_device."""

    placed = False


_thread = _Thread()


def unavailable_reason() -> str:
    """Return why there is no GPU to use, and what to do; nothing if there is one. Loads CuPy where it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {_INSTALL}"
    try:
        count = _runtime().getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be loaded ({error}): {_INSTALL}"
    except Exception as error:  # CuPy's own, whose class comes with it
        return f"CUDA finds no GPU ({error})"
    return "" if count else "CUDA finds no GPU"


def nccl_unavailable_reason() -> str:
    """Return why NCCL cannot be used, and what to do; nothing if it can."""
    why = unavailable_reason()
    if why:
        return why
    try:
        available = bool(_nccl().available)
    except ImportError as error:
        return f"NCCL cannot be loaded ({error}): pip install nvidia-nccl-cu12"
    return "" if available else "this CuPy was built without NCCL: pip install nvidia-nccl-cu12 cupy-cuda12x"


def nccl() -> Any:
    """Return ``cupy.cuda.nccl``."""
    return _nccl()


def cupy() -> Any:
    """Return CuPy."""
    import cupy

    return cupy


@functools.cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


@functools.cache
def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl


@contextlib.contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Raise CUDA's errors as DistBackendError.

    Args:
        what: what is being done, for people.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # CUDARuntimeError, CUDADriverError, NcclError, OutOfMemoryError
        if isinstance(error, DistBackendError):
            raise
        raise DistBackendError(f"{what}: {error}") from error


# Devices


def gpu_id(device: int) -> str:
    """Return what is equal for processes that use the same GPU, and different for others, of other hosts too.

    The machine and the GPU's place on its bus, as NCCL tells them apart, which refuses two instances of one GPU (MIG),
    though these have UUIDs of their own.
    """
    return f"{_machine()}/{_runtime().deviceGetPCIBusId(device)}"


@functools.cache
def _machine() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(_runtime().getDeviceProperties(device)["multiProcessorCount"])


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device the thread's current one for a while; that of a thread of ours, for good the first time.

    A new thread's current device is 0, whoever uses it: to go back to that would make a context there, half a gigabyte
    of a GPU that may be another rank's.
    """
    runtime = _runtime()
    before = runtime.getDevice()
    if not _thread.placed:
        _thread.placed = True
        if threading.current_thread().name.startswith(_OURS):
            before = device
    runtime.setDevice(device)  # current already or not: the driver's functions need the context that this makes current
    try:
        yield
    finally:
        if before != device:
            runtime.setDevice(before)


# Streams and events


def create_stream() -> int:
    """Make a stream that does not wait for the legacy default stream."""
    return int(_runtime().streamCreateWithFlags(_NON_BLOCKING))


def current_stream(device: int = -1) -> int:
    """Return CuPy's current stream of a device, by default the current one."""
    return int(cupy().cuda.get_current_stream(device).ptr)


def stream_object(stream: int) -> Any:
    """Return CuPy's object for a stream, a context manager that makes it CuPy's current one."""
    library = cupy().cuda
    if hasattr(library.Stream, "from_external"):
        return library.Stream.from_external(_Foreign(stream))
    return library.ExternalStream(stream)  # before CuPy 14


class _Foreign:
    """A stream, by the protocol of CUDA's Python libraries."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def destroy_stream(stream: int) -> None:
    """Let a stream go; what is enqueued on it goes on."""
    _runtime().streamDestroy(stream)


def synchronize_stream(stream: int) -> None:
    """Wait until all that is enqueued on a stream has ended. Cannot be interrupted."""
    _runtime().streamSynchronize(stream)


def synchronize_device() -> None:
    """Wait until all that is enqueued on the current device has ended. Cannot be interrupted."""
    _runtime().deviceSynchronize()


def create_event(*, shared: bool = False) -> int:
    """Make an event; ``shared`` with other processes, by its handle."""
    return int(_runtime().eventCreateWithFlags(_NO_TIMING | (_INTERPROCESS if shared else 0)))


def destroy_event(event: int) -> None:
    """Let an event go."""
    _runtime().eventDestroy(event)


def record_event(event: int, stream: int) -> None:
    """Have an event happen when all that is enqueued on a stream by now has ended."""
    _runtime().eventRecord(event, stream)


def stream_wait_event(event: int, stream: int) -> None:
    """Have what is enqueued on a stream from now on wait until an event has happened."""
    _runtime().streamWaitEvent(stream, event)


def event_completed(event: int) -> bool:
    """Whether an event has happened since it was recorded last, or never was.

    Raises:
        DistBackendError: the GPU has failed, so that it never will.
    """
    runtime = _runtime()
    status = int(runtime.eventQuery(event))  # CuPy returns errors here, where its other functions raise them
    if status not in (0, _NOT_READY):
        raise DistBackendError(f"what was enqueued on a GPU failed: {runtime.CUDARuntimeError(status)}")
    return status == 0


def event_handle(event: int) -> bytes:
    """Return what another process opens a shared event with."""
    return bytes(_runtime().ipcGetEventHandle(event))


def open_event(handle: bytes) -> int:
    """Open another process's shared event."""
    return int(_runtime().ipcOpenEventHandle(handle))


# Memory


def allocate(nbytes: int, stream: int) -> Any:
    """Return memory of CuPy's pool, as an object with ``.ptr``, which goes back when nobody refers to it.

    It is for what is enqueued on the stream: the pool may lend it again to what comes later there.
    """
    with stream_object(stream):
        return cupy().cuda.alloc(nbytes)


def malloc(nbytes: int) -> int:
    """Return the address of memory that is an allocation of its own, so that a handle to it can be had."""
    return int(_runtime().malloc(nbytes))


def free(pointer: int) -> None:
    """Give back what allocate_alone returned."""
    _runtime().free(pointer)


def copy_async(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy, within a device or between devices."""
    if nbytes:
        _runtime().memcpyAsync(destination, source, nbytes, _DEFAULT_KIND, stream)


class Allocation(NamedTuple):
    """What an address lies in.

    Attributes:
        base: where it begins.
        id: a number that no other allocation of this process has, or had.
    """

    base: int
    id: int


def allocation_of(pointer: int) -> Allocation:
    """Return the allocation that an address lies in.

    Raises:
        DistBackendError: it is none of the driver's.
    """
    base, size, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    driver = _driver()
    failed = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    failed = failed or driver.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(pointer))
    if failed:
        raise DistBackendError(f"the memory at {pointer:#x} is not the CUDA driver's (error {failed})")
    return Allocation(base.value, number.value)


@functools.cache
def _driver() -> ctypes.CDLL:
    """Return the driver's own library: CuPy has no binding for what an allocation is."""
    return ctypes.CDLL("libcuda.so.1")


def memory_handle(base: int) -> bytes:
    """Return what another process opens an allocation with."""
    return bytes(_runtime().ipcGetMemHandle(base))


def open_memory(handle: bytes) -> int:
    """Map another process's allocation; return where it begins here."""
    return int(_runtime().ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))


def close_memory(pointer: int) -> None:
    """Unmap what open_memory mapped."""
    _runtime().ipcCloseMemHandle(pointer)
