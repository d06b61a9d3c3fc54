"""The driver's library, as far as CuPy has no binding for it: loading ``libcuda.so.1`` gives what is here."""

from __future__ import annotations

import ctypes
from typing import Any

from cupy import _gpus, _memory

_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_VERSION = 13_000
_BUFFER_ID = 7


class Driver:
    """Takes the same ctypes arguments as the driver's functions, and returns their errors."""

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = _VERSION
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:  # noqa: N802
        if not _gpus.has_context():
            return _INVALID_CONTEXT
        segment = _memory.find(_number(pointer))
        if segment is None or segment.gpu is None:
            return _INVALID_VALUE
        base._obj.value, size._obj.value = segment.base, segment.size
        return 0

    def cuPointerGetAttribute(self, data: Any, attribute: Any, pointer: Any) -> int:  # noqa: N802
        segment = _memory.find(_number(pointer))
        if segment is None or _number(attribute) != _BUFFER_ID:
            return _INVALID_VALUE
        data._obj.value = segment.number
        return 0


def _number(value: Any) -> int:
    return int(getattr(value, "value", value))


class _CDLL(ctypes.CDLL):
    def __new__(cls, name: str | None, *args: Any, **options: Any) -> Any:
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


ctypes.CDLL = _CDLL  # type: ignore[misc]
