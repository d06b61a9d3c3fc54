"""Arrays as MPI wants them: one piece of memory, with the counts of the parts that are in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.mpi.types import datatype, is_native


def address(array: Array) -> int:
    """Return where an array begins."""
    found: int = array.__array_interface__["data"][0]
    return found


def overlaps(array: Array, others: Sequence[Array]) -> bool:
    """Whether an array shares memory with one of several."""
    return any(np.may_share_memory(array, other) for other in others)


def spec(array: Array) -> Any:
    """Return an array as an argument for mpi4py."""
    dtype = array.dtype
    return (array if is_native(dtype) else array.view(np.uint8)), array.size, datatype(dtype)


class PackedBuffer:
    """Arrays of one dtype as one piece of memory: their own where they lie behind one another, else a copy.

    Args:
        arrays: at least one.
        apart: take a copy in any case.

    Attributes:
        alike: whether they have the same length.
        copied: whether it is a copy.
        counts: their lengths.
    """

    def __init__(self, arrays: Sequence[Array], *, apart: bool = False) -> None:
        self._arrays = arrays
        self._dtype = arrays[0].dtype
        self.counts = [array.size for array in arrays]
        self.uniform = len(set(self.counts)) == 1
        self._count = sum(self.counts)
        self._stage: Array | None = None
        begin = None if apart else _begin_of(arrays)
        self.is_copy = begin is None
        if begin is None:
            self._stage = np.empty(self._count, self._dtype)
            begin = address(self._stage)
        self._begin = begin

    def pack(self) -> PackedBuffer:
        """Take what is in the arrays; return self."""
        if self._stage is not None:
            for array, place in zip(self._arrays, self._places(), strict=True):
                self._stage[place] = array
        return self

    def unpack(self) -> None:
        """Give the arrays what has been received."""
        if self._stage is not None:
            for array, place in zip(self._arrays, self._places(), strict=True):
                array[:] = self._stage[place]

    def total_spec(self) -> Any:
        """Return all of it as an argument for mpi4py."""
        return self._memory(), self._count, datatype(self._dtype)

    def uniform_spec(self) -> Any:
        """Return it as an argument for a call in which all parts have the same length."""
        return self._memory(), self.counts[0], datatype(self._dtype)

    def vector_spec(self) -> Any:
        """Return it as an argument for a call in which each part has its own length."""
        return self._memory(), (self.counts, [place.start for place in self._places()]), datatype(self._dtype)

    def _memory(self) -> Any:
        return mpi().buffer.fromaddress(self._begin, self._count * self._dtype.itemsize)

    def _places(self) -> list[slice]:
        return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(self.counts, initial=0))]


def _begin_of(arrays: Sequence[Array]) -> int | None:
    """Return where arrays begin that lie behind one another, None if they do not."""
    begin: int | None = None
    expected = 0
    for array in arrays:
        if not array.size:
            continue
        here = address(array)
        if begin is None:
            begin = here
        elif here != expected:
            return None
        expected = here + array.nbytes
    return address(arrays[0]) if begin is None else begin
