"""CUDA C++ compiled for this machine's processor: the kernels' arithmetic where there is no GPU.

A kernel's threads run one after the other, so kernels whose threads wait for each other cannot run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

COMPILER = shutil.which("g++") or shutil.which("c++")
"""The C++ compiler, None where there is none."""

_WORDS = """
#include <math.h>
#include <string.h>
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
struct Place { unsigned x, y, z; };
static thread_local Place gridDim, blockDim, blockIdx, threadIdx;
"""
_LAUNCH = """
template <int... I> struct Numbers {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Numbers<I...> Type; };
template <class... A, int... I>
static void call(void (*kernel)(A...), void** arguments, Numbers<I...>) { kernel(*(A*)arguments[I]...); }
template <class... A>
static void launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (blockIdx = {}; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx = {}; threadIdx.x < threads; threadIdx.x++)
            call(kernel, arguments, typename Count<sizeof...(A)>::Type());
}
"""
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')
# As -fmad=false does; integers wrap around where C++ leaves it open.
_FLAGS = ("-std=c++14", "-O1", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-w", "-shared", "-fPIC")


class CpuModule:
    """Kernels compiled for the processor, as NVRTC compiles them for a GPU.

    Args:
        code: CUDA C++ that asks nothing of CUDA's headers; its kernels are ``extern "C"``.
    """

    def __init__(self, code: str) -> None:
        launchers = "".join(
            f'extern "C" void launch_{name}(unsigned blocks, unsigned threads, void** arguments) '
            f"{{ launch({name}, blocks, threads, arguments); }}\n"
            for name in _KERNEL.findall(code)
        )
        self._library = ctypes.CDLL(str(_built(_WORDS + code + _LAUNCH + launchers)))

    def get_function(self, name: str) -> CpuKernel:
        return CpuKernel(self._library[f"launch_{name}"])


def _built(text: str) -> Path:
    """Compile a text, or find what a process compiled before; return the library."""
    assert COMPILER
    folder = Path(tempfile.gettempdir(), f"cpu-kernels-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{hashlib.sha256(repr((text, _FLAGS)).encode()).hexdigest()}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as building:
            source, fresh = Path(building, "kernels.cpp"), Path(building, "kernels.so")
            source.write_text(text)
            done = subprocess.run([COMPILER, *_FLAGS, "-o", fresh, source], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            fresh.rename(library)
    return library


class CpuKernel:
    """One of them; called as ``cupy.cuda.Function`` is, with arrays of one element, which are passed by value."""

    def __init__(self, launch: ctypes._NamedFuncPointer) -> None:
        self._launch = launch

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[np.ndarray], stream: object = None
    ) -> None:
        assert all(argument.size == 1 for argument in arguments)
        addresses = (ctypes.c_void_p * len(arguments))(*(argument.ctypes.data for argument in arguments))
        self._launch(*map(ctypes.c_uint, (grid[0], block[0])), addresses)
