"""CuPy's devices."""

from __future__ import annotations

from typing import Any

from cupy.cuda import runtime


class Device:
    def __init__(self, device: Any = None) -> None:
        self.id: int = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self._before.append(runtime.getDevice())
        return self.use()

    def __exit__(self, *args: object) -> None:
        runtime.setDevice(self._before.pop())

    def use(self) -> Device:
        runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        with self:
            runtime.deviceSynchronize()
