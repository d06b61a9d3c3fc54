"""Arithmetic of the reductions; no other module of the collectives computes."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh_agent.collectives import float16
from rankmesh_agent.collectives.float16 import narrow, widen
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.wire.dtypes import COMPLEX32, FROM_CODE, WIDE, display, family
from rankmesh_agent.wire.ops import PremulSum, ReduceOp

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.PREMUL_SUM: np.add,
}
_FAMILIES: dict[ReduceOp, frozenset[str]] = {
    ReduceOp.SUM: frozenset({"bool", "int", "float", "complex"}),
    ReduceOp.AVG: frozenset({"int", "float", "complex"}),
    ReduceOp.PRODUCT: frozenset({"bool", "int", "float", "complex"}),
    ReduceOp.MIN: frozenset({"bool", "int", "float"}),
    ReduceOp.MAX: frozenset({"bool", "int", "float"}),
    ReduceOp.BAND: frozenset({"bool", "int"}),
    ReduceOp.BOR: frozenset({"bool", "int"}),
    ReduceOp.BXOR: frozenset({"bool", "int"}),
    ReduceOp.PREMUL_SUM: frozenset({"int", "float", "complex"}),
}
_SINGLE_UFUNC: dict[tuple[ReduceOp, np.dtype[Any]], np.ufunc] = {
    (op, dtype): ufunc
    for op, ufunc in _UFUNCS.items()
    for dtype in FROM_CODE.values()
    if op is not ReduceOp.AVG
    and family(dtype) in _FAMILIES[op]
    and dtype not in WIDE
    and not (op is ReduceOp.PRODUCT and family(dtype) == "complex")
}
"""Fast path: reductions that consist of one ufunc on the arrays as they are; nearly all calls."""
_HALVES = frozenset({np.dtype(np.float16), COMPLEX32})
_INT, _UINT = np.dtype(np.int64), np.dtype(np.uint64)
CACHE_BYTES = 1 << 18
"""Bytes of each array that an algorithm reduces at a time, where it has the choice: all arrays stay in the cache."""
_WIDE_PIECE = 1 << 16
"""Elements widened at a time: 256 KiB of float32, which stay in the cache."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.rows = np.empty((2, _WIDE_PIECE * 8), np.uint8)


_scratch = _Scratch()


def ignore_fp_errors() -> contextvars.Context:
    """Return a context in which arithmetic neither warns nor raises, for one thread at a time.

    Every rank must return infinity; a user's numpy.seterr must not make one of them raise in the middle of a call.
    Entering a context takes a tenth of the time of numpy.errstate.
    """
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context


def combine(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Reduce ``parts``, one for each rank, in rank order, into ``out``.

    The order is fixed, so every rank computes the same result bit for bit. Types narrower than float32 accumulate in
    float32 and round once. The average of integers accumulates in 64 bits and rounds towards zero, as in NCCL. Other
    integers wrap around; MIN and MAX propagate NaN. SUM of bool is 'or', PRODUCT is 'and'.

    The context's ``numpy.errstate`` determines the report of overflow and NaN, see ``ignore_fp_errors``.

    Args:
        op: an operation that ``check_op`` accepts. PREMUL_SUM only adds: the caller applies ``premultiplied`` before.
        parts: at least one array of ``out``'s dtype and length; only the first two may overlap ``out``, and only if
            they are ``out`` itself.
    """
    ufunc = _SINGLE_UFUNC.get((op, out.dtype))
    if ufunc is not None and len(parts) > 1:
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)
        return
    if len(parts) == 1:
        if parts[0] is not out:
            out[:] = parts[0]
        return
    if out.size == 1 and op is ReduceOp.PRODUCT and family(out.dtype) == "complex":
        # NumPy rounds a single complex product differently if the output is an operand.
        pair = np.empty(2, out.dtype)
        combine(op, [part.repeat(2) for part in parts], pair)
        out[:] = pair[:1]
        return
    ufunc = _UFUNCS[op]
    average = op is ReduceOp.AVG
    if ufunc is np.add and out.dtype in _HALVES:
        divisor = len(parts) if average else 1
        if divisor & (divisor - 1) == 0:
            float16.add([part.view(np.float16) for part in parts], out.view(np.float16), divisor)
            return
    wide = _accumulator(out.dtype, average)
    if wide is not None:
        for begin in range(0, out.size, _WIDE_PIECE):
            piece = slice(begin, begin + _WIDE_PIECE)
            _combine_wide(ufunc, [part[piece] for part in parts], out[piece], wide, average)
        return
    ufunc(parts[0], parts[1], out=out)
    for part in parts[2:]:
        ufunc(out, part, out=out)
    if average:
        np.divide(out, len(parts), out=out)


def combine_in_place(op: ReduceOp, parts: list[Array], rank: int, out: Array) -> None:
    """Reduce as ``combine`` does; ``out`` may also be part number ``rank``."""
    if rank > 1 and np.may_share_memory(parts[rank], out):
        parts[rank] = parts[rank].copy()
    combine(op, parts, out)


def partial_dtype(op: ReduceOp, dtype: np.dtype[Any], members: int) -> np.dtype[Any]:
    """Return the dtype of partial results in which the rest of a reduction loses no precision.

    Args:
        members: total number of ranks in the reduction.
    """
    if op is ReduceOp.AVG and dtype.kind in "iu":
        needed = 8 * dtype.itemsize + (members - 1).bit_length()
        return np.dtype(f"{dtype.kind}{next((bits for bits in (16, 32) if bits >= needed), 64) // 8}")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype  # the result is one of the operands: no rounding
    return WIDE.get(dtype, dtype)


def combine_to_partial(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Reduce the arrays of some ranks, in rank order, to a partial result for ``combine_partials``.

    Args:
        parts: at least one array.
        out: array of ``partial_dtype`` and of equal length; overlaps none of them, but see ``combine`` for equal
            dtypes.
    """
    plain = ReduceOp.SUM if op is ReduceOp.AVG else op
    if parts[0].dtype == out.dtype:
        combine(plain, parts, out)
        return
    for begin in range(0, out.size, _WIDE_PIECE):
        piece = slice(begin, begin + _WIDE_PIECE)
        total = _widened(parts[0][piece], out[piece])
        other = _scratch.rows[0][: total.nbytes].view(total.dtype)
        for part in parts[1:]:
            combine(plain, [total, _widened(part[piece], other)], total)


def combine_partials(op: ReduceOp, partials: Sequence[Array], members: int, out: Array) -> None:
    """Reduce partial results, in their order, to the result: round once, and divide an average once.

    Args:
        partials: results of ``combine_to_partial``, at least one; none overlaps ``out``, but see ``combine`` for equal
            dtypes.
        members: total number of ranks in the reduction.
    """
    average = op is ReduceOp.AVG
    plain = ReduceOp.SUM if average else op
    integers = average and out.dtype.kind in "iu"
    if partials[0].dtype == out.dtype and not integers:
        combine(plain, partials, out)
        if average:
            np.divide(out, members, out=out)
        return
    for begin in range(0, out.size, _WIDE_PIECE):
        piece = slice(begin, begin + _WIDE_PIECE)
        parts = [partial[piece] for partial in partials]
        total = _scratch.rows[0][: parts[0].nbytes].view(parts[0].dtype)
        combine(plain, parts, total)
        if integers:
            out[piece] = _mean(total.astype(_INT if out.dtype.kind == "i" else _UINT), members)
            continue
        if average:
            np.divide(total, members, out=total)
        narrow(total, out[piece])


def premultiplied(factor: complex, array: Array) -> Array:
    """Return a copy of an array, multiplied by ``factor`` and rounded once to its own dtype.

    For an array on a GPU: the same elements with the factor, by which NCCL multiplies.
    """
    if not isinstance(array, np.ndarray):
        return array.scaled(factor)
    out = np.empty_like(array)
    with np.errstate(all="ignore"):
        if array.dtype in WIDE:
            narrow(widen(array) * factor, out)
        else:
            np.multiply(array, factor, out=out)
    return out


def check_op(op: ReduceOp | PremulSum, dtype: np.dtype[Any]) -> None:
    """Check that a reduction is defined for a dtype.

    Raises:
        TypeError: the operation is not defined for the dtype, or its factor does not fit it.
    """
    if op is ReduceOp.PREMUL_SUM:
        raise TypeError("ReduceOp.PREMUL_SUM needs its factor: pass ReduceOp.PREMUL_SUM(0.5), for example")
    kind = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    category = family(dtype)
    if category not in _FAMILIES[kind]:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for {display(dtype)}{_REASONS.get(category, '')}")
    if isinstance(op, PremulSum):
        _check_factor(op.factor, category, dtype)


def _check_factor(factor: complex, category: str, dtype: np.dtype[Any]) -> None:
    if isinstance(factor, complex) and category != "complex":
        raise TypeError(f"PREMUL_SUM of {display(dtype)} needs a real factor, got {factor!r}")
    if category == "int":
        if not isinstance(factor, int):
            raise TypeError(f"PREMUL_SUM of {dtype} needs a factor of type int, got {factor!r}")
        limits = np.iinfo(dtype)
        if not limits.min <= factor <= limits.max:
            raise TypeError(f"the factor {factor} of PREMUL_SUM does not fit into {dtype}")


_REASONS = {
    "complex": ": complex numbers have no order and no bits to combine",
    "float": ": it is a bitwise operation on integers and bool",
    "opaque": ": opaque elements are only copied, without arithmetic",
}


def _accumulator(dtype: np.dtype[Any], average: bool) -> np.dtype[Any] | None:
    """Return the dtype of the accumulator, None for the dtype of the arrays."""
    if average and dtype.kind in "iu":
        return _INT if dtype.kind == "i" else _UINT
    return WIDE.get(dtype)


def _combine_wide(ufunc: np.ufunc, parts: list[Array], out: Array, wide: np.dtype[Any], average: bool) -> None:
    integers = wide is _INT or wide is _UINT
    if not integers:
        total, other = (row[: out.size * wide.itemsize].view(wide) for row in _scratch.rows)
        widen(parts[0], total)
        for part in parts[1:]:
            ufunc(total, widen(part, other), out=total)
        if average:
            np.divide(total, len(parts), out=total)
        narrow(total, out)
        return
    total = parts[0].astype(wide)
    for part in parts[1:]:
        ufunc(total, part.astype(wide), out=total)
    out[:] = _mean(total, len(parts))


def _mean(total: Array, members: int) -> Array:
    """Divide 64-bit sums of integers and round towards zero; may change ``total``."""
    if total.dtype == _INT:
        total += np.where(total < 0, members - 1, 0)  # floor division then rounds towards zero
    return total // members


def _widened(array: Array, out: Array) -> Array:
    """Convert an array to the dtype of partial results, in ``out``, and return ``out``."""
    if array.dtype in WIDE:
        return widen(array, out)
    out[:] = array
    return out
