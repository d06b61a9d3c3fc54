"""Arrays in the form that MPI takes: contiguous memory with counts and displacements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.types import datatype, is_native


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
