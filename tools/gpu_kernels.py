"""Run each reduction kernel on the GPU, on allocations of its own, and compare with the arithmetic on the host.

compute-sanitizer python tools/gpu_kernels.py
ncu --kernel-name run python tools/gpu_kernels.py --profile
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.collectives.reduction import combine, premultiplied
from rankmesh_agent.device import runtime
from rankmesh_agent.device.kernels import LARGE_CAPACITY, SMALL_CAPACITY, Kernels
from rankmesh_agent.wire.dtypes import FROM_NAME, display
from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]
MIB = 1 << 20
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex32", "complex64", "complex128")
_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_OPS = (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class Launch(NamedTuple):
    """A launch: its arrays lie ``shift`` elements behind the start of their allocations. ``op`` None scales by 3."""

    op: ReduceOp | None
    dtype: np.dtype[Any]
    arrays: int
    elements: int
    shift: int = 0

    def __str__(self) -> str:
        name = "scale" if self.op is None else self.op.name
        return f"{name} of {self.arrays} arrays of {self.elements} {display(self.dtype)}, shifted by {self.shift}"


def launches(small: bool) -> Iterator[Launch]:
    """Yield the launches: each kernel of a representative element type once, and each way through one of them."""
    names = ["float32", "bfloat16", "int32"] if small else [*_FLOATS, *_COMPLEX, *_INTEGERS]
    for name in names:
        yield Launch(ReduceOp.SUM, FROM_NAME[name], 2, 1003)
    for name in ("float32",) if small else ("float32", "int32"):
        for op in _OPS if name == "float32" else (*_OPS, *_BITS):
            yield Launch(op, FROM_NAME[name], 4, 1003)
        yield Launch(None, FROM_NAME[name], 1, 1003)
    float32 = FROM_NAME["float32"]
    yield Launch(ReduceOp.SUM, float32, 1, 1003, 1)  # a copy
    yield Launch(ReduceOp.SUM, float32, 2, 1)
    for shift in (1, 2, 3):
        yield Launch(ReduceOp.SUM, float32, 2, 100_003, shift)
    yield Launch(ReduceOp.SUM, FROM_NAME["bfloat16"], SMALL_CAPACITY // 2 + 1, 1003)  # of large capacity
    if not small:
        yield Launch(ReduceOp.SUM, float32, LARGE_CAPACITY // 2, 103)


def run(launch: Launch, kernels: Kernels) -> bool:
    """Launch a kernel whose destinations are its sources; return whether all results are those of the host."""
    cupy, op, dtype = runtime.cupy(), launch.op, launch.dtype
    rng = np.random.default_rng(launch.arrays)
    given = [_values(rng, launch.elements, dtype) for _ in range(launch.arrays)]
    expected = np.empty_like(given[0])
    with np.errstate(all="ignore"):
        if op is None:
            expected = premultiplied(3, given[0])
        else:
            combine(op, given, expected)
    memory = [_Memory(array, launch.shift) for array in given]
    stream = cupy.cuda.Stream(non_blocking=True)
    addresses = [each.address for each in memory]
    if op is None:
        kernels.scale(3, dtype, addresses[0], addresses[0], launch.elements, stream.ptr)
    else:
        kernels.reduce(op, dtype, addresses, addresses, launch.elements, stream.ptr)
    stream.synchronize()
    results = [each.take() for each in memory]
    return all(_same(result, expected) for result in results)


class _Memory:
    """A copy of an array in an allocation that ends with it, so that memcheck reports accesses behind it."""

    def __init__(self, array: Array, shift: int) -> None:
        self._cuda, self._like = runtime.cupy().cuda.runtime, array
        self._base = runtime.malloc(shift * array.itemsize + array.nbytes)
        self.address = self._base + shift * array.itemsize
        self._copy(self.address, array.ctypes.data, self._cuda.memcpyHostToDevice)

    def take(self) -> Array:
        """Return the contents, and free the memory."""
        array = np.empty_like(self._like)
        self._copy(array.ctypes.data, self.address, self._cuda.memcpyDeviceToHost)
        runtime.free(self._base)
        return array

    def _copy(self, to: int, source: int, kind: int) -> None:
        self._cuda.memcpyAsync(to, source, self._like.nbytes, kind, 0)
        runtime.synchronize_stream(0)


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a complex number's parts, and of other numbers their own."""
    if display(dtype) == "complex32":
        return np.dtype(np.float16)
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _values(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    """Return any bits, infinities and NaN among them; for floats, a third are subnormal numbers."""
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    part = _part(dtype)
    numbers = np.frombuffer(rng.bytes(count * dtype.itemsize), part).copy()
    if part.kind not in "iu":
        least = np.array([1], f"u{part.itemsize}").view(part)
        numbers[::3] = least * rng.integers(-3, 4, numbers[::3].size).astype(part)
    return numbers.view(dtype)


def _same(found: Array, wanted: Array) -> bool:
    """Return whether all bits are equal, but for those of NaN, which are another processor's choice."""
    part = _part(found.dtype)
    found, wanted = found.view(part), wanted.view(part)
    same = found.view(f"u{part.itemsize}") == wanted.view(f"u{part.itemsize}")
    return bool(np.all(same | ((found != found) & (wanted != wanted))))


def profile(nbytes: int, arrays: int, kernels: Kernels) -> None:
    """Launch the kernel of all_reduce over CUDA IPC a few times: it reads and writes ``arrays`` arrays."""
    stream = runtime.cupy().cuda.Stream(non_blocking=True)
    memory = [runtime.malloc(nbytes) for _ in range(arrays)]
    for _ in range(4):
        kernels.reduce(ReduceOp.SUM, FROM_NAME["float32"], memory, memory, nbytes // 4, stream.ptr)
    stream.synchronize()
    for pointer in memory:
        runtime.free(pointer)


def main() -> None:
    """Run all launches, or the one to be profiled; a wrong result is exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few launches")
    parser.add_argument("--profile", action="store_true", help="only sum two arrays of 256 MiB")
    options = parser.parse_args()
    kernels = Kernels(runtime.multiprocessors(0))
    if options.profile:
        profile(256 * MIB, 2, kernels)
        return
    every = list(launches(options.small))
    wrong = [launch for launch in every if not run(launch, kernels)]
    for launch in wrong:
        print(f"wrong: {launch}")
    print(f"result: {len(every) - len(wrong)} of {len(every)} launches of kernels equal the host's arithmetic")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
