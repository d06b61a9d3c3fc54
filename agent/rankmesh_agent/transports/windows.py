"""What the ranks of a segment let each other read of their own memory, which saves the copies through the slots.

*Registered* arrays lie in shared memory that all ranks have mapped. Any other array can be read with process_vm_readv
where the kernel allows it. Before anything is read, each rank tells where what it shows lies::

    slot of rank r     for each rank, by rank: region + 1 and offset in it, or 0 and address   (8 bytes each)

A rank may change what it shows when all have said that they have read it: ``Shown.done``. A rank that leaves the call
before that, by an error or Ctrl-C, says so, too, and then nothing that was read counts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.transports import vmread
from rankmesh_agent.transports.shared import Mapping
from rankmesh_agent.wire.errors import DistNetworkError

if TYPE_CHECKING:
    from rankmesh_agent.transports.segment import Segment

Typed = npt.NDArray[Any]
_WORD = np.dtype(np.uint64)
_PAGE = 4096


class Region:
    """Shared memory with an array of every rank, all of one size.

    Args:
        mapping: the memory.
        rank: this rank.
        size: ranks in the group.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int) -> None:
        stride = mapping.bytes.size // size
        self.parts = [mapping.bytes[owner * stride : (owner + 1) * stride] for owner in range(size)]
        self.begin = mapping.address + rank * stride
        self.end = self.begin + stride
        self._own: weakref.ref[Typed] | None = None

    @staticmethod
    def size_of(size: int, nbytes: int) -> int:
        """Return the bytes of memory for an array of ``nbytes`` at each rank."""
        return size * max(_PAGE, -(-nbytes // _PAGE) * _PAGE)

    def lend(self, rank: int, nbytes: int) -> Typed:
        """Return this rank's array, as bytes; the region is in use as long as anything refers to it."""
        own = np.frombuffer(self.parts[rank].data, np.uint8)[:nbytes]
        base = own.base  # what NumPy makes the base of every view of it
        assert isinstance(base, np.ndarray)
        self._own = weakref.ref(base)
        return own

    @property
    def in_use(self) -> bool:
        """Whether somebody still has this rank's array, or a view of it."""
        return self._own is not None and self._own() is not None


class Windows:
    """One rank's side.

    Args:
        segment: tells the others where things lie, and when they have been read.

    Attributes:
        reads: whether every rank may read the memory of every other: the same at all of them.
        regions: registered memory by number: the same at all ranks.
    """

    def __init__(self, segment: Segment) -> None:
        self.reads = False
        self.regions: dict[int, Region] = {}
        self._segment = segment
        self._pids: list[int] = []
        self._made = 0

    @property
    def usable(self) -> bool:
        """Whether it may be worth the step to show something: the same at all ranks."""
        return self.reads or bool(self.regions)

    def add(self, mapping: Mapping) -> Region:
        """Take memory into use, at all ranks in the same order."""
        self._made += 1
        region = self.regions[self._made] = Region(mapping, self._segment.rank, self._segment.size)
        return region

    def locate(self, array: Typed) -> tuple[int, int]:
        """Return what the others are told of an array: contiguous, of at least one element."""
        address = vmread.address_of(array)
        for number, region in self.regions.items():
            if region.begin <= address < region.end:
                return number + 1, address - region.begin
        return 0, address

    def show(self, arrays: Sequence[Typed | None]) -> Shown:
        """Tell each rank where what is for it lies; ends a step.

        Args:
            arrays: for each rank, by rank; None, or an empty one, where there is nothing to read.
        """
        segment = self._segment
        size = segment.size
        table = segment.slots(_WORD, 2 * size)
        row = table[segment.rank]
        last: Typed | None = None
        place = nothing = 1, 0
        for reader, array in enumerate(arrays):
            if array is not last:
                place = self.locate(array) if array is not None and array.size else nothing
                last = array
            row[2 * reader : 2 * reader + 2] = place
        segment.step()
        return Shown(segment, self, np.array(table, np.int64).reshape(size, size, 2), self._pids)

    def probe(self) -> None:
        """Find out, with all others, whether process_vm_readv is allowed; two steps."""
        segment = self._segment
        nonce = np.frombuffer(os.urandom(16), np.uint8)
        mine = np.array([os.getpid(), vmread.address_of(nonce)], _WORD)
        slots = segment.slots(np.dtype(np.uint8), 32)
        slots[segment.rank][:16] = mine.view(np.uint8)
        slots[segment.rank][16:] = nonce
        segment.step()
        said = [(slot[:16].view(_WORD).tolist(), slot[16:].tobytes()) for slot in slots]
        self._pids = [pid for (pid, _), _ in said]
        allowed = all(vmread.allowed(pid, address, expected) for (pid, address), expected in said)
        verdicts = segment.slots(np.dtype(np.uint8), 1)
        verdicts[segment.rank][:] = allowed
        segment.step()
        self.reads = all(verdict[0] for verdict in verdicts)
        segment.step()  # before the nonce goes


class Shown:
    """What all ranks show in one call."""

    def __init__(self, segment: Segment, windows: Windows, table: npt.NDArray[np.int64], pids: Sequence[int]) -> None:
        self.mapped = bool(table[:, :, 0].all())
        """Whether all of it is registered."""
        self.readable = self.mapped or windows.reads
        """Whether every rank can read what is for it: the same at all of them."""
        self._segment = segment
        self._regions = windows.regions
        self._places: list[list[int]] = table[:, segment.rank].tolist()
        self._pids = pids

    def view(self, owner: int, like: Typed) -> Typed:
        """Return what a rank shows to this one, if it is registered: of ``like``'s dtype and length."""
        number, offset = self._places[owner]
        if number == 1:
            return like[:0]
        return self._regions[number - 1].parts[owner][offset : offset + like.nbytes].view(like.dtype)

    def read(self, owner: int, begin: int, into: Typed, *, alone: bool = False) -> None:
        """Fill ``into`` from element ``begin`` of what a rank shows to this one.

        Args:
            owner: the rank.
            begin: the first element.
            into: where to.
            alone: whether the owner only waits meanwhile.

        Raises:
            DistBackendError: the rank is gone.
        """
        if not into.size:
            return
        number, where = self._places[owner]
        where += begin * into.itemsize
        if number:
            into[:] = self._regions[number - 1].parts[owner][where : where + into.nbytes].view(into.dtype)
            return
        try:
            vmread.read_into(self._pids[owner], where, into, two_cores=alone and not self._segment.crowded)
        except DistNetworkError:
            self._segment.suspect(owner)

    def done(self) -> None:
        """End the last step: everyone has read; what was shown may change.

        Raises:
            DistBackendError: a rank has left the call before, so what was read may be anything.
        """
        self._segment.step()
        for owner in self._segment.left():
            self._segment.suspect(owner)
