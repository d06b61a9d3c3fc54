"""A CuPy and an nccl4py whose calls do nothing: what calls take over them is this project's own time on the host."""

from __future__ import annotations

import itertools
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_addresses = itertools.count(1 << 21, 1 << 21)
_handles = itertools.count(1)


def install() -> None:
    """Have ``import cupy`` give this module's CuPy, in a process that has not imported another one."""
    stream = SimpleNamespace(ptr=7, synchronize=_nothing)
    runtime = _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=RuntimeError,
        deviceGetPCIBusId=lambda device: f"0000:00:{os.environ['RANK']}.0",
        eventQuery=lambda event: 0,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        **dict.fromkeys(("eventCreateWithFlags", "streamCreateWithFlags"), _handle),
        **dict.fromkeys(("eventDestroy", "eventRecord", "setDevice", "streamDestroy", "streamWaitEvent"), _nothing),
    )
    nccl = _module(
        "nccl.bindings.nccl",
        NCCLError=RuntimeError,
        UniqueId=SimpleNamespace(from_buffer=_nothing),
        comm_get_async_error=lambda comm: 0,
        comm_init_rank=_handle,
        get_unique_id=lambda: bytes(128),
        get_version=lambda: 99_999,
        **dict.fromkeys(("all_reduce", "comm_destroy"), _nothing),
    )
    _module("nccl", bindings=_module("nccl.bindings", nccl=nccl))
    cuda = _module("cupy.cuda", get_current_stream=lambda *device: stream, runtime=runtime)
    _module("cupy", cuda=cuda, ndarray=_Array)


def array(size: int, dtype: str) -> Any:
    """Return an array, at an address where there is nothing."""
    return _Array(size, dtype)


class _Array:
    __module__ = "cupy"
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012  # never read
    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, size: int, dtype: str) -> None:
        self.size, self.dtype = size, np.dtype(dtype)
        self.data = SimpleNamespace(ptr=next(_addresses), device_id=0)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _handle(*ignored: object) -> int:
    return next(_handles)


def _nothing(*ignored: object, **named: object) -> None:
    pass
