"""Table of the reductions that NCCL performs, with NCCL's operation and element type of each."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rankmesh_agent.wire.ops import ReduceOp

_UINT8 = 1
_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): _UINT8,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
    np.dtype(ml_dtypes.bfloat16): 9,
}
"""NCCL's enumeration of the element types it reduces."""
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
"""NCCL's enumeration of its reductions."""
_COMPONENTS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
_BOOL_OPS = {
    ReduceOp.SUM: 2, ReduceOp.MAX: 2, ReduceOp.BOR: 2, ReduceOp.PRODUCT: 3, ReduceOp.MIN: 3, ReduceOp.BAND: 3,
}  # fmt: skip
"""For bytes that are 0 or 1, 'or' is the maximum, and 'and' the minimum."""
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)
_OF_FLOATS = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)


class NcclReduction(NamedTuple):
    """A reduction as NCCL performs it.

    Attributes:
        type, op: in NCCL's enumerations; the operation of PREMUL_SUM is created for each call.
        width: NCCL elements per element.
    """

    type: int
    op: int
    width: int = 1


@functools.cache
def reduction(dtype: np.dtype[Any], op: ReduceOp) -> NcclReduction | None:
    """Return how NCCL performs a reduction, None if it does not."""
    if dtype == np.bool_:
        return NcclReduction(_UINT8, _BOOL_OPS[op]) if op in _BOOL_OPS else None
    if dtype in _COMPONENTS:
        return NcclReduction(_TYPES[_COMPONENTS[dtype]], _OPS[op], 2) if op in _SUMS else None
    if dtype not in _TYPES or (op in _OF_FLOATS and dtype.kind in "iu"):
        return None
    if op is ReduceOp.PREMUL_SUM:
        return NcclReduction(_TYPES[dtype], -1)
    return NcclReduction(_TYPES[dtype], _OPS[op]) if op in _OPS else None
