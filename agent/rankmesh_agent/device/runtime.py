"""CUDA runtime, by way of CuPy: the only module that calls it.

Memory, streams and events are CUDA's handles and addresses, as integers. Functions that create or enqueue something use
the calling thread's current device, which ``DeviceGuard`` sets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rankmesh_agent.device import packages
from rankmesh_agent.wire.errors import DistBackendError

_NO_TIMING = 2
_NON_BLOCKING = 1
_DEFAULT_KIND = 4
"""cudaMemcpyDefault: the runtime infers the direction of a copy from the addresses."""
_NOT_READY = 600
"""cudaErrorNotReady."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_THREAD_PREFIX = "rankmesh-"


class _ThreadState(threading.local):
    """State of a thread: whether it has set a device by ``DeviceGuard``."""

    has_device = False


_thread = _ThreadState()


def unavailable_reason() -> str:
    """Return why no GPU is available and the remedy, '' if one is. Imports CuPy where it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {packages.install_hint()}"
    conflict = packages.conflict()
    if conflict:
        return conflict
    try:
        count = _runtime().getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be loaded ({error}): {packages.install_hint()}"
    except Exception as error:  # CuPy's own, whose class comes with it
        return f"CUDA finds no GPU ({error})"
    return "" if count else "CUDA finds no GPU"


def nccl_unavailable_reason() -> str:
    """Return why NCCL is unavailable and the remedy, '' if it is available."""
    why = unavailable_reason()
    if why:
        return why
    try:
        nccl()
    except ImportError as error:
        return f"nccl4py is not installed ({error}): {packages.nccl_hint()}"
    except RuntimeError as error:
        return f"nccl4py finds no NCCL ({' '.join(str(error).split())}): {packages.nccl_hint()}"
    return ""


@functools.cache
def cupy() -> Any:
    """Return CuPy."""
    import cupy

    return cupy


@functools.cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


@functools.cache
def nccl() -> Any:
    """Return the functions of NCCL as nccl4py binds them, over torch's library if it finds none.

    Raises:
        ImportError: nccl4py is not installed.
        RuntimeError: there is no library.
    """
    from nccl.bindings import nccl

    try:
        nccl.get_version()
    except RuntimeError:  # DynamicLibNotFoundError, of cuda.pathfinder
        if not packages.load_nccl():
            raise
        nccl.get_version()
    return nccl


@contextlib.contextmanager
def cuda_errors(operation: str) -> Iterator[None]:
    """Raise CUDA's errors in a block as DistBackendError, which names the operation in progress."""
    try:
        yield
    except DistBackendError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError | MemoryError | nccl().NCCLError):  # CuPy's are of the first two kinds
            raise DistBackendError(f"{operation}: {error}") from error
        raise


# Devices


def gpu_id(device: int) -> str:
    """Return an identity of a GPU that is equal in all processes that use it, and unique across hosts.

    It is the machine and the GPU's PCI bus id, as in NCCL: that refuses two instances of one GPU (MIG), although these
    have UUIDs of their own.
    """
    return f"{_machine()}/{_runtime().deviceGetPCIBusId(device)}"


@functools.cache
def _machine() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


class DeviceGuard:
    """Context manager that makes a device the calling thread's current one; in a thread of this package, for good.

    A new thread's current device is 0. To restore it would create a context there, half a gigabyte of a GPU that may be
    another rank's.
    """

    __slots__ = ("_before", "_device")

    def __init__(self, device: int) -> None:
        self._before = self._device = device

    def __enter__(self) -> None:
        runtime, device = _runtime(), self._device
        before = runtime.getDevice()
        if _thread.has_device:
            if before != device:
                self._before = before
                runtime.setDevice(device)
            return
        _thread.has_device = True
        if not threading.current_thread().name.startswith(_THREAD_PREFIX):
            self._before = before
        runtime.setDevice(device)  # even if current: a new thread has no context before

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._before != self._device:
            _runtime().setDevice(self._before)


# Streams and events


def create_stream() -> int:
    """Create a stream that does not synchronize with the legacy default stream."""
    return int(_runtime().streamCreateWithFlags(_NON_BLOCKING))


def current_stream(device: int = -1) -> int:
    """Return CuPy's current stream of a device, the current device by default."""
    return int(cupy().cuda.get_current_stream(device).ptr)


def stream_object(stream: int) -> Any:
    """Return CuPy's object for a stream, a context manager that makes it CuPy's current stream."""
    return cupy().cuda.Stream.from_external(_ExternalStream(stream))


class _ExternalStream:
    """A stream with the ``__cuda_stream__`` protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def destroy_stream(stream: int) -> None:
    """Destroy a stream; work enqueued on it still completes."""
    _runtime().streamDestroy(stream)


def synchronize_stream(stream: int) -> None:
    """Wait until all work enqueued on a stream has completed. Cannot be interrupted."""
    _runtime().streamSynchronize(stream)


def create_event() -> int:
    """Create an event."""
    return int(_runtime().eventCreateWithFlags(_NO_TIMING))


def destroy_event(event: int) -> None:
    """Destroy an event."""
    _runtime().eventDestroy(event)


def record_event(event: int, stream: int) -> None:
    """Record an event: it completes once all work enqueued on a stream so far has."""
    _runtime().eventRecord(event, stream)


def stream_wait_event(event: int, stream: int) -> None:
    """Make the work enqueued on a stream from now on wait for an event."""
    _runtime().streamWaitEvent(stream, event)


def event_completed(event: int) -> bool:
    """Return whether an event has completed since it was last recorded; True if it never was."""
    runtime = _runtime()
    status = int(runtime.eventQuery(event))  # CuPy returns errors here; its other functions raise them
    if status not in (0, _NOT_READY):
        raise DistBackendError(f"work on a GPU failed: {runtime.CUDARuntimeError(status)}")
    return status == 0


# Memory


def allocate(nbytes: int, stream: int) -> Any:
    """Return memory of CuPy's pool, as an object with ``.ptr``; it returns to the pool with the last reference.

    It is for work enqueued on the stream: the pool may reuse it for later work there.
    """
    with stream_object(stream):
        return cupy().cuda.alloc(nbytes)


def copy_async(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy within a device or between devices."""
    if nbytes:
        _runtime().memcpyAsync(destination, source, nbytes, _DEFAULT_KIND, stream)


def pinned_array(count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array in host memory that the GPU copies from and to directly."""
    memory = cupy().cuda.alloc_pinned_memory(max(count * dtype.itemsize, 1))
    return np.frombuffer(memory, np.uint8, count * dtype.itemsize).view(dtype)
