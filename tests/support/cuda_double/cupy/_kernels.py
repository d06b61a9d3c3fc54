"""Kernels: compiled for the processor, and run on the stream's thread."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from support.cpu_kernels import CpuModule

from cupy import _gpus, _streams
from cupy._array import ndarray
from cupy.cuda.stream import get_current_stream

_compiled = functools.cache(CpuModule)


class Module:
    """What was compiled, on the GPU that is current when it is loaded."""

    def load(self, cubin: bytes) -> None:
        self._gpu, self._code = _gpus.gpu(), cubin.decode()

    def get_function(self, name: str) -> Function:
        return Function(self, name)


class Function:
    def __init__(self, module: Module, funcname: str) -> None:
        self._gpu, self._code = module._gpu, module._code
        self._name = funcname

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        queue = _streams.stream((stream or get_current_stream()).ptr)
        if queue.gpu is not _gpus.gpu() or self._gpu is not queue.gpu or not all((*grid, *block)):
            raise _gpus.CUDARuntimeError(400)
        kernel = _compiled(self._code).get_function(self._name)
        values = [_value(argument) for argument in args]
        queue.enqueue(lambda: kernel(grid, block, values))


def _value(argument: Any) -> np.ndarray[Any, Any]:
    """Return a copy of what the kernel gets by value, as an array of one element."""
    if isinstance(argument, ndarray):
        return np.array([argument.data.ptr], np.uint64)
    if isinstance(argument, np.ndarray) and argument.size != 1:
        raise TypeError(f"Unsupported type {type(argument)} of {argument.size} elements")
    return np.array(argument).reshape(1)
