"""MPI datatypes for NumPy's dtypes, and MPI operations for reductions.

MPI's own arithmetic is used where it performs the documented reduction. Elsewhere MPI calls a Python function: its MIN
and MAX lose NaN, its complex product treats infinities differently from NumPy's, and Open MPI's sums of 8 and 16 bits
saturate where NumPy's wrap around. Element types that MPI does not know move as bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from rankmesh_agent.collectives.reduction import combine
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.wire.dtypes import WIDE, family
from rankmesh_agent.wire.ops import ReduceOp

_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_OPERATIONS = {ReduceOp.PRODUCT: "PROD", **dict.fromkeys(_SUMS, "SUM")}
"""Names of MPI's operations that differ from ours."""
_BOOL_OPERATIONS = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), "LOR"),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), "LAND"),
    ReduceOp.BXOR: "LXOR",
}
_dtypes: dict[int, np.dtype[Any]] = {}
"""dtypes by the handles of their MPI datatypes: a custom operation receives a handle."""


def is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether MPI has a predefined datatype for a dtype."""
    return dtype.kind in "biufc" and dtype not in WIDE


@cache
def datatype(dtype: np.dtype[Any]) -> Any:
    """Return the MPI datatype of a dtype; it is never freed."""
    MPI = mpi()  # noqa: N806  # mpi4py's usual name
    native = is_native(dtype)
    found = MPI.Datatype.fromcode(dtype.char) if native else MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    _dtypes[found.handle] = dtype
    return found


@cache
def operation(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return the MPI operation that reduces arrays of a dtype; for AVG, the one that adds them."""
    kind = family(dtype)
    if kind == "bool":
        return getattr(mpi(), _BOOL_OPERATIONS[op])
    loses_nan = kind == "float" and op in (ReduceOp.MIN, ReduceOp.MAX)
    saturates = kind == "int" and dtype.itemsize <= 2 and op in _SUMS
    if dtype in WIDE or loses_nan or saturates or (kind == "complex" and op is ReduceOp.PRODUCT):
        return _custom_operation(ReduceOp.SUM if op in _SUMS else op)
    return getattr(mpi(), _OPERATIONS.get(op, op.name))


@cache
def _custom_operation(op: ReduceOp) -> Any:
    """Return an operation that runs ``combine``. One serves all dtypes, as MPI libraries limit their number."""

    def reduce(incoming: Any, result: Any, datatype: Any) -> None:
        dtype = _dtypes[datatype.handle]
        first, second = (np.frombuffer(part, np.uint8).view(dtype) for part in (incoming, result))
        combine(op, [first, second], second)

    return mpi().Op.Create(reduce, commute=True)
