"""CuPy's streams and events, and which stream is the thread's current one."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from cupy.cuda import runtime


class _Local(threading.local):
    def __init__(self) -> None:
        self.current: dict[int, _BaseStream] = {}
        self.entered: list[tuple[int, _BaseStream]] = []


_local = _Local()


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr = runtime.eventCreateWithFlags(disable_timing * runtime.eventDisableTiming)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            runtime.eventDestroy(self.ptr)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self) -> Any:
        device = self._device()
        _local.entered.append((device, get_current_stream(device)))
        _local.current[device] = self
        return self

    def __exit__(self, *args: object) -> None:
        device, before = _local.entered.pop()
        _local.current[device] = before

    def use(self) -> Any:
        _local.current[self._device()] = self
        return self

    def _device(self) -> int:
        device = runtime.getDevice()
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({device})"
            )
        return device

    @property
    def done(self) -> bool:
        return runtime.streamQuery(self.ptr) == 0

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        runtime.launchHostFunc(self.ptr, callback, arg)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)


class Stream(_BaseStream):
    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self._foreign: object = None
        if null:
            super().__init__(0, -1)
        else:
            super().__init__(runtime.streamCreateWithFlags(int(non_blocking)), runtime.getDevice())

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        made = cls(null=True)
        made._foreign = obj
        _, made.ptr = obj.__cuda_stream__()
        return made

    def __del__(self) -> None:
        if self.__dict__.get("_foreign") is None and self.__dict__.get("ptr"):
            runtime.streamDestroy(self.ptr)


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Any:
    return _local.current.get(runtime.getDevice() if device_id == -1 else device_id, Stream.null)
