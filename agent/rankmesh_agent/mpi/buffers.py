"""Arrays, element types and reductions in the form that MPI takes.

MPI's own arithmetic is used where it performs the documented reduction. Elsewhere MPI calls a Python function: its MIN
and MAX lose NaN, its complex product treats infinities differently from NumPy's, and Open MPI's sums of 8 and 16 bits
saturate where NumPy's wrap around. Element types that MPI does not know move as bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
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


def address(array: Array) -> int:
    """Return the address of an array's first element."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def overlaps(array: Array, others: Sequence[Array]) -> bool:
    """Return whether an array may share memory with one of several."""
    return any(np.may_share_memory(array, other) for other in others)


def spec(array: Array) -> Any:
    """Return an array as mpi4py's buffer specification."""
    dtype = array.dtype
    return (array if is_native(dtype) else array.view(np.uint8)), array.size, datatype(dtype)


class PackedBuffer:
    """Arrays of one dtype as contiguous memory: their own if they are contiguous and ``copy`` is false, else a copy."""

    def __init__(self, arrays: Sequence[Array], *, copy: bool = False) -> None:
        self._arrays = arrays
        self._dtype = arrays[0].dtype
        self.counts = [array.size for array in arrays]
        start = None if copy else _contiguous_start(arrays)
        self._copy = np.empty(sum(self.counts), self._dtype) if start is None else None
        self._start = start if self._copy is None else address(self._copy)

    @property
    def uniform(self) -> bool:
        """True if all arrays have the same size."""
        return len(set(self.counts)) == 1

    @property
    def is_copy(self) -> bool:
        """True if the memory is a copy."""
        return self._copy is not None

    def pack(self) -> PackedBuffer:
        """Copy the arrays into the memory, if it is a copy; return self."""
        if self._copy is not None:
            for array, part in zip(self._arrays, self._parts(), strict=True):
                self._copy[part] = array
        return self

    def unpack(self) -> None:
        """Copy the memory into the arrays, if it is a copy."""
        if self._copy is not None:
            for array, part in zip(self._arrays, self._parts(), strict=True):
                array[:] = self._copy[part]

    def spec(self) -> Any:
        """Return mpi4py's buffer specification of all elements; a collective with a part for each rank divides them."""
        return self._memory(), datatype(self._dtype)

    def vector_spec(self) -> Any:
        """Return mpi4py's buffer specification for a vector collective, with counts and displacements."""
        return self._memory(), (self.counts, [part.start for part in self._parts()]), datatype(self._dtype)

    def _memory(self) -> Any:
        return mpi().buffer.fromaddress(self._start, sum(self.counts) * self._dtype.itemsize)

    def _parts(self) -> list[slice]:
        return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(self.counts, initial=0))]


def _contiguous_start(arrays: Sequence[Array]) -> int | None:
    """Return the address of arrays that are contiguous in memory, in order; None if they are not."""
    filled = [array for array in arrays if array.size] or arrays[:1]
    starts = [address(array) for array in filled]
    ends = [start + array.nbytes for start, array in zip(starts, filled, strict=True)]
    return starts[0] if starts[1:] == ends[:-1] else None
