"""Kernels: CUDA C++ compiled by g++, and run block by block, thread by thread, on the stream's thread.

No thread may wait for another one: there are neither barriers nor shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cupy import _gpus, _streams
from cupy._array import ndarray
from cupy.cuda.stream import get_current_stream

_BEFORE = """
#include <math.h>
#include <string.h>
#include <utility>
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct dim3 { unsigned x, y, z; };
static thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;
"""
_AFTER = """
#define EACH(INDEX, SIZE, AXIS) for (INDEX.AXIS = 0; INDEX.AXIS < SIZE.AXIS; INDEX.AXIS++)
template <class... T, size_t... I>
static void launch(void (*kernel)(T...), dim3* sizes, void** arguments, std::index_sequence<I...>) {
    gridDim = sizes[0], blockDim = sizes[1];
    EACH(blockIdx, gridDim, z) EACH(blockIdx, gridDim, y) EACH(blockIdx, gridDim, x)
    EACH(threadIdx, blockDim, z) EACH(threadIdx, blockDim, y) EACH(threadIdx, blockDim, x)
    kernel(*(T*)arguments[I]...);
}
template <class... T>
static void launch(void (*kernel)(T...), dim3* sizes, void** arguments) {
    launch(kernel, sizes, arguments, std::index_sequence_for<T...>());
}
extern "C" void launch_NAME(dim3* sizes, void** arguments) { launch(NAME, sizes, arguments); }
"""
_FLAGS = ("-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-x", "c++")
_NVRTC_ONLY = ("-fmad", "--fmad", "-arch", "--gpu-architecture", "-default-device")


class RawModule:
    """A text with kernels.

    Args:
        code: CUDA C++.
        options: NVRTC's, of which g++ gets those it has.
    """

    def __init__(self, code: str, *, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._code = code
        self._options = tuple(option for option in options if not option.startswith(_NVRTC_ONLY))

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._code, name, self._options)


class RawKernel:
    """A kernel, compiled when it is launched first."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._what = code, name, options

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        queue = _streams.stream((stream or get_current_stream()).ptr)
        if queue.gpu is not _gpus.gpu() or not all((*grid, *block)):
            raise _gpus.CUDARuntimeError(400)
        function = _compiled(*self._what)
        sizes = (ctypes.c_uint * 6)(*_three(grid), *_three(block))
        values = [_value(argument) for argument in args]

        def work() -> None:
            arguments = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
            function(sizes, arguments)

        queue.enqueue(work)


def _three(size: tuple[int, ...]) -> tuple[int, ...]:
    return (*size, 1, 1)[:3]


def _value(argument: Any) -> np.ndarray[Any, Any]:
    """Return a copy of what the kernel gets."""
    if isinstance(argument, ndarray):
        return np.array([argument.data.ptr], np.uint64)
    if isinstance(argument, np.ndarray) and argument.size != 1:
        raise TypeError(f"Unsupported type {type(argument)} of {argument.size} elements")
    return np.array(argument).reshape(1)


@functools.cache
def _compiled(code: str, name: str, options: tuple[str, ...]) -> Any:
    """Compile a kernel, or find what a process compiled before."""
    text = _BEFORE + code + _AFTER.replace("NAME", name)
    folder = Path(tempfile.gettempdir(), f"cuda-double-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{hashlib.sha256(repr((text, options, _FLAGS)).encode()).hexdigest()}.so"
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            ["g++", *_FLAGS, *options, "-o", fresh, "-"], input=text, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"g++ does not take the kernel:\n{done.stderr}")
        fresh.rename(library)
    return getattr(ctypes.CDLL(str(library)), f"launch_{name}")
