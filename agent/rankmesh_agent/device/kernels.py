"""CUDA kernels that reduce and scale arrays on GPUs, and their launch.

The results equal those of ``collectives.reduction.combine`` bit for bit, except for the bits of NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.device import packages
from rankmesh_agent.wire.dtypes import COMPLEX32, FROM_NAME, WIDE, display, family
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import ReduceOp

SMALL_CAPACITY, LARGE_CAPACITY = 16, 500
"""Sources and destinations that fit a kernel's argument. A launch copies the argument, of 4 KiB at most."""
OPTIONS = ("-std=c++14", "-fmad=false")
"""Options of NVRTC: a product that is added rounds twice, as in NumPy."""
NAME = "run"
"""Name of the kernel in ``source``."""

_HEADER = 8
_THREADS = 256
_BLOCKS = 8
"""Blocks per multiprocessor: as many threads as it can hold."""
_PACK = 16
"""Bytes that a thread moves at once."""
_MAX_PREPARED = 256
"""Largest number of launches kept prepared: a training reduces the same arrays in each step."""

_OPERATIONS = {
    None: "Scale",
    ReduceOp.SUM: "Sum",
    ReduceOp.AVG: "Average",
    ReduceOp.PRODUCT: "Product",
    ReduceOp.MIN: "Minimum",
    ReduceOp.MAX: "Maximum",
    ReduceOp.BAND: "And",
    ReduceOp.BOR: "Or",
    ReduceOp.BXOR: "Xor",
    ReduceOp.PREMUL_SUM: "Sum",
}
_OF_BOOL: dict[ReduceOp | None, str] = {
    ReduceOp.SUM: "Or",
    ReduceOp.MAX: "Or",
    ReduceOp.PRODUCT: "And",
    ReduceOp.MIN: "And",
}
_ELEMENTS = {
    FROM_NAME[name]: element
    for name, element in {
        "float16": "Real<Half>",
        "float32": "Real<Single>",
        "float64": "Real<Double>",
        "complex32": "Pair<Half>",
        "complex64": "Pair<Single>",
        "complex128": "Pair<Double>",
        "bfloat16": "Real<Narrow<2, 7, 127, IEEE>>",
        "float8_e4m3fn": "Real<Narrow<1, 3, 7, FN>>",
        "float8_e5m2": "Real<Narrow<1, 2, 15, IEEE>>",
        "float8_e4m3fnuz": "Real<Narrow<1, 3, 8, FNUZ>>",
        "float8_e5m2fnuz": "Real<Narrow<1, 2, 16, FNUZ>>",
        "float8_e8m0fnu": "Real<Exponent>",
    }.items()
}
_INTEGERS = {1: "char", 2: "short", 4: "int", 8: "long long"}
_BYTE = np.dtype(np.uint8)


class Kernels:
    """Compiles kernels at first use, by CuPy, and launches them on the current device.

    Args:
        multiprocessors: their number on the device, ``cupy.cuda.Device().attributes["MultiProcessorCount"]``.
    """

    def __init__(self, multiprocessors: int) -> None:
        self._max_blocks = _BLOCKS * multiprocessors
        self._compiled: dict[tuple[np.dtype[Any], ReduceOp | None, int], Any] = {}
        self._prepared: dict[_Arguments, tuple[Any, int, np.ndarray[Any, Any]]] = {}

    def reduce(
        self,
        op: ReduceOp,
        dtype: np.dtype[Any],
        sources: Sequence[int],
        destinations: Sequence[int],
        count: int,
        stream: int,
        members: int | None = None,
    ) -> None:
        """Reduce arrays in the order given, and write the result to every destination, in one kernel.

        It runs at the speed of the memory if all addresses are congruent modulo 16. A single array is copied, whatever
        its element type.

        Args:
            op: a reduction that ``collectives.reduction.refuse`` accepts. PREMUL_SUM adds: ``scale`` comes before.
            dtype: of all arrays.
            sources: addresses of one or more arrays of ``count`` elements in the device's memory.
            destinations: addresses for the result. Each is a source or overlaps no other array.
            count: elements of each array.
            stream: the ``cudaStream_t`` to enqueue the kernel on, as an integer; its device is current.
            members: divisor of AVG, ``len(sources)`` by default.

        Raises:
            TypeError: GPUs have no arithmetic for the element type.
            ValueError: there are more than LARGE_CAPACITY arrays, or one is not aligned to its elements.
            DistBackendError: NVRTC, which compiles a kernel at its first launch, is missing or fails.
        """
        if len(sources) == 1 and (op is not ReduceOp.AVG or members in (None, 1)):
            op, dtype, count = ReduceOp.BOR, _BYTE, count * dtype.itemsize
        self._launch(_Arguments(dtype, op, tuple(sources), tuple(destinations), count, members or len(sources)), stream)

    def scale(
        self, factor: complex, dtype: np.dtype[Any], source: int, destination: int, count: int, stream: int
    ) -> None:
        """Multiply an array by a number, rounded once, as ``collectives.reduction.premultiplied`` does.

        Args:
            factor: an int for integers; complex only for complex elements.
            dtype: of both arrays.
            source: address of ``count`` elements in the device's memory.
            destination: address for the result; may be ``source``.
            count: elements of each array.
            stream: as for ``reduce``.

        Raises:
            TypeError, ValueError, DistBackendError: as for ``reduce``.
        """
        self._launch(_Arguments(dtype, None, (source,), (destination,), count, factor=_bits(factor, dtype)), stream)

    def _launch(self, arguments: _Arguments, stream: int) -> None:
        if arguments.elements == 0 or not arguments.destinations:
            return
        prepared = self._prepared.get(arguments)
        if prepared is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            prepared = self._prepared[arguments] = self._prepare(arguments)
        kernel, blocks, table = prepared
        kernel((blocks,), (_THREADS,), (table,), stream=_Stream(stream))

    def _prepare(self, arguments: _Arguments) -> tuple[Any, int, np.ndarray[Any, Any]]:
        """Return the kernel of a launch, its number of blocks and its argument, an array of one element."""
        dtype, op, sources, destinations, count, members, factor = arguments
        pointers = [*sources, *destinations]
        if len(pointers) > LARGE_CAPACITY:
            raise ValueError(f"a kernel reads and writes {LARGE_CAPACITY} arrays at most, not {len(pointers)}")
        capacity = SMALL_CAPACITY if len(pointers) <= SMALL_CAPACITY else LARGE_CAPACITY
        head, packs = _layout(pointers, dtype, count)
        table = np.zeros(1, table_dtype(capacity))
        words = table.view(np.uint64)
        words[:_HEADER] = count, head, packs, len(sources), len(destinations), members, *factor
        words[_HEADER : _HEADER + len(pointers)] = pointers
        blocks = min(-(-max(packs, count - packs * _PACK // dtype.itemsize) // _THREADS), self._max_blocks)
        return self._kernel(dtype, op, capacity), blocks, table

    def _kernel(self, dtype: np.dtype[Any], op: ReduceOp | None, capacity: int) -> Any:
        kernel = self._compiled.get((dtype, op, capacity))
        if kernel is None:
            what = f"{'scaling' if op is None else op.name} of {display(dtype)}"
            kernel = self._compiled[dtype, op, capacity] = _compile(source(dtype, op, capacity), what)
        return kernel


class _Arguments(NamedTuple):
    """Arguments of a launch: see Kernels.reduce; ``factor`` is that of a scaling, as bits."""

    dtype: np.dtype[Any]
    op: ReduceOp | None
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    elements: int
    members: int = 1
    factor: tuple[int, int] = (0, 0)


class _Stream(NamedTuple):
    """A stream as CuPy's kernels take it."""

    ptr: int


def _compile(code: str, what: str) -> Any:
    """Return a kernel, loaded on the current device. CuPy's RawModule would flush subnormal numbers (``-ftz=true``)."""
    from cupy.cuda import Module, compiler

    try:
        binary, _ = compiler.compile_using_nvrtc(code, OPTIONS)
        module = Module()
        module.load(binary)
        return module.get_function(NAME)
    except compiler.CompileException as error:
        raise DistBackendError(f"the kernel for {what} cannot be compiled: {error}") from error
    except RuntimeError as error:  # there is no NVRTC
        hint = packages.install_hint()
        raise DistBackendError(f"the kernel for {what} cannot be compiled: {error}; {hint}") from error


@functools.cache
def source(dtype: np.dtype[Any], op: ReduceOp | None, capacity: int = SMALL_CAPACITY) -> str:
    """Return the CUDA C++ of a kernel named ``run``, whose only argument is a ``table_dtype(capacity)`` by value.

    Args:
        dtype: of the arrays.
        op: a reduction that ``collectives.reduction.refuse`` accepts; None for scaling.
        capacity: largest number of sources and destinations in all.

    Raises:
        TypeError: GPUs have no arithmetic for the element type.
    """
    return prelude() + entry(dtype, op, capacity, NAME)


@functools.cache
def prelude() -> str:
    """Return the CUDA C++ that all kernels share."""
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def entry(dtype: np.dtype[Any], op: ReduceOp | None, capacity: int, name: str) -> str:
    """Return the CUDA C++ of one kernel, for use after ``prelude``; see ``source``."""
    operation = _OF_BOOL.get(op, _OPERATIONS[op]) if dtype.kind == "b" else _OPERATIONS[op]
    return f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {name}(const __grid_constant__ Table<{capacity}> table) {{
    reduce<{_element(dtype, op)}, {operation}>(table);
}}
"""


@functools.cache
def table_dtype(capacity: int) -> np.dtype[Any]:
    """Return the layout of a kernel's argument with ``capacity`` addresses, sources first; see kernels.cu."""
    header = ["count", "head", "packs", "sources", "destinations", "members"]
    return np.dtype([*((name, "u8") for name in header), ("factor", "u8", 2), ("pointer", "u8", capacity)])


def _element(dtype: np.dtype[Any], op: ReduceOp | None) -> str:
    """Return the C++ type of an element: its format, and the type in which integers are computed."""
    if dtype in _ELEMENTS:
        return _ELEMENTS[dtype]
    if dtype.kind not in "iub":
        instead = {"float": "; use float64", "complex": "; use complex128"}.get(family(dtype), "")
        raise TypeError(f"GPUs have no arithmetic for {display(dtype)}{instead}")
    sign = "signed" if dtype.kind == "i" else "unsigned"
    wide = "long long" if dtype.itemsize == 8 or (dtype.itemsize == 4 and op is ReduceOp.AVG) else "int"
    compared = op in (ReduceOp.MIN, ReduceOp.MAX)
    return f"Real<Integer<{sign} {_INTEGERS[dtype.itemsize]}, {sign if compared else 'unsigned'} {wide}>>"


def _layout(pointers: Sequence[int], dtype: np.dtype[Any], count: int) -> tuple[int, int]:
    """Return the number of elements before the first pack, and the number of packs."""
    remainders = {pointer % _PACK for pointer in pointers}
    size = dtype.itemsize
    part = size // 2 if dtype == COMPLEX32 or dtype.kind == "c" else size
    if any(remainder % part for remainder in remainders):
        raise ValueError(f"arrays of {display(dtype)} in a GPU's memory have to lie at multiples of {part} bytes")
    skipped = -min(remainders) % _PACK
    if len(remainders) > 1 or skipped % size:
        return count, 0  # element by element
    head = min(skipped // size, count)
    return head, (count - head) * size // _PACK


def _bits(factor: complex, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bits of the real and imaginary parts, in the type of the multiplication."""
    wide = np.dtype(np.int64 if dtype.kind == "i" else np.uint64) if dtype.kind in "iu" else WIDE.get(dtype, dtype)
    with np.errstate(all="ignore"):
        number = np.array([factor], wide)
    parts = number.view(f"f{wide.itemsize // 2}") if wide.kind == "c" else number
    bits = [int(part) for part in parts.view(f"u{parts.itemsize}")]
    return bits[0], bits[-1] if wide.kind == "c" else 0
