"""What NumPy says a reduction must be: written down apart from the project's own arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]

OPS: list[ReduceOp] = [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]
COMPLEX32 = np.dtype([("real", np.float16), ("imag", np.float16)])
NARROW = frozenset(
    map(
        np.dtype,
        (
            np.float16,
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
            ml_dtypes.float8_e4m3fnuz,
            ml_dtypes.float8_e5m2fnuz,
            ml_dtypes.float8_e8m0fnu,
        ),
    )
)
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def ops_of(dtype: np.dtype[Any]) -> set[ReduceOp]:
    """Return the operations that make sense for a dtype."""
    bits = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
    if dtype.kind == "c" or dtype == COMPLEX32:
        return {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG}
    if dtype.kind == "f" or dtype in NARROW:
        return set(OPS) - bits
    if dtype.kind == "b":
        return set(OPS) - {ReduceOp.AVG}
    return set(OPS) if dtype.kind in "iu" else set()


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return what a rank contributes: numbers small enough that a product of nine of them is exact in most dtypes."""
    drawn = _drawn(rank, count)
    if dtype == COMPLEX32:
        return (drawn + 1j * drawn[::-1]).astype(np.complex64).view(np.float32).astype(np.float16).view(dtype)
    if dtype.kind == "c":
        return (drawn + 1j * drawn[::-1]).astype(dtype)
    if dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        return (2.0**drawn).astype(dtype)  # it has powers of two only
    if dtype.kind == "f" or dtype in NARROW:
        return ((drawn - 1) * 1.25).astype(np.float32).astype(dtype)
    if dtype.kind == "V":
        return np.resize(drawn.astype(np.uint8), count * dtype.itemsize).view(dtype)
    return drawn.astype(dtype)


@functools.cache
def _drawn(rank: int, count: int) -> Array:
    """Return numbers from 0 to 2; drawing them takes longer than what most tests do with them."""
    drawn = np.random.default_rng([rank, count]).integers(0, 3, count).astype(np.int8)
    drawn.flags.writeable = False
    return drawn


def expected(op: ReduceOp, parts: list[Array]) -> Array:
    """Return the reduction in rank order; what is narrower than float32 is accumulated in float32."""
    dtype = parts[0].dtype
    if dtype == COMPLEX32:
        wide = [part.view(np.float16).astype(np.float32).view(np.complex64) for part in parts]
        return expected(op, wide).view(np.float32).astype(np.float16).view(dtype)
    if op is ReduceOp.AVG:
        return average(parts)
    wide_dtype = np.dtype(np.float32) if dtype in NARROW else dtype
    total = parts[0].astype(wide_dtype)
    for part in parts[1:]:
        total = _UFUNCS[op](total, part.astype(wide_dtype), dtype=wide_dtype)
    return total.astype(dtype)


def average(parts: list[Array]) -> Array:
    """Return the mean: of integers exactly, rounded towards zero; of others the sum divided."""
    dtype = parts[0].dtype
    if dtype.kind in "iu":
        sums = map(sum, zip(*(part.tolist() for part in parts), strict=True))
        return np.array([abs(total) // len(parts) * (1 if total >= 0 else -1) for total in sums], dtype)
    wide_dtype = np.dtype(np.float32) if dtype in NARROW else dtype
    total = parts[0].astype(wide_dtype)
    for part in parts[1:]:
        total = np.add(total, part.astype(wide_dtype), dtype=wide_dtype)
    return np.divide(total, len(parts), dtype=wide_dtype).astype(dtype)
