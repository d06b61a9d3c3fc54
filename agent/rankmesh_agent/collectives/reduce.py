"""The arithmetic of reductions: the only place with any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.wire.ops import ReduceOp

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_HALF = np.dtype(np.float16)
_WIDE = np.dtype(np.float32)
_WIDE_PIECE = 1 << 15
"""Elements widened at a time: 128 KiB of float32, which stay in the cache."""


def combine(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Reduce ``parts``, one a rank, in rank order, into ``out``.

    The order is fixed, so the result is the same bit for bit wherever and by whomever it is computed. float16 is
    accumulated in float32 and rounded once. Integers wrap around; NaN is propagated by MIN and MAX.

    Args:
        op: how.
        parts: at least one array of ``out``'s dtype and length; none may overlap ``out`` but the first.
        out: where the result goes.
    """
    if out.dtype == _HALF:
        _combine_wide(_UFUNCS[op], parts, out)
        return
    if len(parts) == 1:
        out[:] = parts[0]
        return
    ufunc = _UFUNCS[op]
    # Infinity is the answer on every rank; the user's numpy.seterr must not make one of them raise half-way.
    with np.errstate(all="ignore"):
        ufunc(parts[0], parts[1], out=out)
        for part in parts[2:]:
            ufunc(out, part, out=out)


def _combine_wide(ufunc: np.ufunc, parts: Sequence[Array], out: Array) -> None:
    for begin in range(0, out.size, _WIDE_PIECE):
        piece = slice(begin, begin + _WIDE_PIECE)
        wide = parts[0][piece].astype(_WIDE)
        with np.errstate(all="ignore"):
            for part in parts[1:]:
                ufunc(wide, part[piece], out=wide)
            out[piece] = wide


def refuse(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Refuse a reduction that has no meaning.

    Raises:
        TypeError: MIN or MAX of complex numbers, which have no order.
    """
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"ReduceOp.{op.name} is not defined for {dtype}: complex numbers have no order")
