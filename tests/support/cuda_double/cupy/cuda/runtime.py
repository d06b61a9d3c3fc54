"""CUDA's runtime, as CuPy shows it."""

# ruff: noqa: N802

from __future__ import annotations

import ctypes

import numpy as np

from cupy import _gpus, _memory, _streams
from cupy._gpus import CUDARuntimeError as CUDARuntimeError

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)  # noqa: N816
eventDefault, eventBlockingSync, eventDisableTiming = 0, 1, 2  # noqa: N816
streamDefault, streamNonBlocking, streamLegacy = 0, 1, 1  # noqa: N816

_NOT_READY = 600


# Devices


def getDeviceCount() -> int:
    return len(_gpus.GPUS) if _gpus.gpu() else 0


def getDevice() -> int:
    return _gpus.gpu().number


def setDevice(device: int) -> None:
    _gpus.use(device)


def getDeviceProperties(device: int) -> dict[str, object]:
    gpu = _gpus.gpu(device)
    return {
        "name": b"a double of a GPU",
        "uuid": gpu.uuid,
        "totalGlobalMem": gpu.capacity,
        "major": 9,
        "minor": 0,
    }


def deviceGetPCIBusId(device: int) -> str:
    return _gpus.gpu(device).bus


def deviceSynchronize() -> None:
    _streams.tidy()
    for queue in list(_gpus.gpu().queues):
        queue.tail.wait()
    _streams.raise_failure()


# Memory


def malloc(size: int) -> int:
    _gpus.touch()
    _streams.raise_failure()
    return _memory.allocate(size, _gpus.gpu())


def free(ptr: int) -> None:
    if ptr:
        segment = _memory.find(ptr)
        for queue in list(segment.gpu.queues) if segment and segment.gpu else ():
            queue.tail.wait()
        _memory.release(ptr)


def memGetInfo() -> tuple[int, int]:
    gpu = _gpus.gpu()
    return gpu.capacity - gpu.used, gpu.capacity


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    if not memcpyHostToHost <= kind <= memcpyDefault:
        raise CUDARuntimeError(1)
    to_gpu, from_gpu = (_memory.find(address) is not None for address in (dst, src))
    data = b"" if from_gpu else ctypes.string_at(src, size)  # set aside, as CUDA does with memory that is not pinned

    def work() -> None:
        source = _memory.view(src, size) if from_gpu else np.frombuffer(data, np.uint8)
        if to_gpu:
            _memory.view(dst, size)[:] = source
        else:
            ctypes.memmove(dst, source.ctypes.data, size)

    mark = _streams.stream(stream).enqueue(work)
    if not to_gpu:
        mark.wait()


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    _streams.stream(stream).enqueue(lambda: _memory.view(ptr, size).fill(value))


# Streams


def streamCreateWithFlags(flags: int) -> int:
    return _streams.new_stream(not flags & streamNonBlocking)


def streamDestroy(stream: int) -> None:
    _streams.drop_stream(stream)


def streamSynchronize(stream: int) -> None:
    _streams.tidy()
    _streams.stream(stream).tail.wait()
    _streams.raise_failure()


def streamQuery(stream: int) -> int:
    """Return the error, if there is one: as in CuPy this raises none."""
    _gpus.touch()
    return _streams.failure() or (0 if _streams.stream(stream).tail.reached else _NOT_READY)


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    awaited = _streams.event(event)
    number = awaited.latest
    _streams.stream(stream).enqueue(lambda: awaited.wait(number))


def launchHostFunc(stream: int, callback: object, arg: object) -> None:
    _streams.stream(stream).enqueue(lambda: callback(arg))  # type: ignore[operator]


# Events


def eventCreate() -> int:
    return eventCreateWithFlags(eventDefault)


def eventCreateWithFlags(flags: int) -> int:
    return _streams.new_event()


def eventDestroy(event: int) -> None:
    _streams.drop_event(event)


def eventRecord(event: int, stream: int) -> None:
    recorded, where = _streams.event(event), _streams.stream(stream)
    if recorded.gpu is not where.gpu:
        raise CUDARuntimeError(400)
    recorded.record(where)


def eventQuery(event: int) -> int:
    """Return the error, if there is one: as in CuPy this raises none."""
    _gpus.touch()
    try:
        asked = _streams.event(event)
    except CUDARuntimeError as error:
        return error.status
    return _streams.failure() or (0 if asked.reached(asked.latest) else _NOT_READY)


def eventSynchronize(event: int) -> None:
    awaited = _streams.event(event)
    awaited.wait(awaited.latest)
    _streams.raise_failure()
