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

_DATATYPES: dict[np.dtype[Any], str] = {
    np.dtype(name): datatype
    for name, datatype in {
        "bool": "C_BOOL",
        "int8": "INT8_T",
        "int16": "INT16_T",
        "int32": "INT32_T",
        "int64": "INT64_T",
        "uint8": "UINT8_T",
        "uint16": "UINT16_T",
        "uint32": "UINT32_T",
        "uint64": "UINT64_T",
        "float32": "FLOAT",
        "float64": "DOUBLE",
        "longdouble": "LONG_DOUBLE",
        "complex64": "C_FLOAT_COMPLEX",
        "complex128": "C_DOUBLE_COMPLEX",
        "clongdouble": "C_LONG_DOUBLE_COMPLEX",
    }.items()
}
_SUMS = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_OPERATIONS = {
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
    **dict.fromkeys(_SUMS, "SUM"),
}
_BOOL_OPERATIONS = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), "LOR"),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), "LAND"),
    ReduceOp.BXOR: "LXOR",
}
_dtypes: dict[int, np.dtype[Any]] = {}
"""dtypes by the handles of their MPI datatypes: a custom operation receives a handle."""


def is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether MPI has a predefined datatype for a dtype."""
    return dtype in _DATATYPES


@cache
def datatype(dtype: np.dtype[Any]) -> Any:
    """Return the MPI datatype of a dtype; it is never freed."""
    MPI = mpi()  # noqa: N806  # mpi4py's usual name
    name = _DATATYPES.get(dtype)
    found = getattr(MPI, name) if name else MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
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
    return getattr(mpi(), _OPERATIONS[op])


@cache
def _custom_operation(op: ReduceOp) -> Any:
    """Return an operation that runs ``combine``. One serves all dtypes, as MPI libraries limit their number."""

    def reduce(incoming: Any, result: Any, datatype: Any) -> None:
        dtype = _dtypes[datatype.handle]
        first, second = (np.frombuffer(part, np.uint8).view(dtype) for part in (incoming, result))
        combine(op, [first, second], second)

    return mpi().Op.Create(reduce, commute=True)
