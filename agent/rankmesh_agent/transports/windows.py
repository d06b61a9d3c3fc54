"""Memory windows: arrays that the ranks of a segment expose to each other, which saves the copies through the slots.

*Registered* arrays lie in shared memory that all ranks have mapped. Any other array can be read with process_vm_readv
where the kernel allows it. Before anything is read, each rank tells where what it shows lies::

    note of rank r     for each rank, by rank: region and offset in it, or ORDINARY and address, or NOTHING and 0
                       (8 bytes each)

A rank may change what it shows when those it shows something to have said that they have read it: ``Shown.done``. A
rank that leaves the call before that, by an error or Ctrl-C, says so, too, and then nothing that was read counts.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.transports import process_vm
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.transports.slots import Slots
from rankmesh_agent.wire.errors import DistNetworkError

Typed = npt.NDArray[Any]
_WORD = np.dtype(np.uint64)
_PAGE = 4096
PRIVATE, NOT_EXPOSED = 0, -1
"""In place of a region's number, which counts from one."""


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
    def bytes_for(size: int, nbytes: int) -> int:
        """Return the bytes of memory for an array of ``nbytes`` at each rank."""
        return size * max(_PAGE, -(-nbytes // _PAGE) * _PAGE)

    def own_array(self, rank: int, nbytes: int) -> Typed:
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


class MemoryWindows:
    """One rank's side.

    Args:
        segment: tells the others where things lie, and when they have been read.

    Attributes:
        reads: whether every rank may read the memory of every other: the same at all of them.
        regions: registered memory by number: the same at all ranks.
        pids: of all ranks.
    """

    def __init__(self, segment: Slots) -> None:
        self.can_read = False
        self.regions: dict[int, Region] = {}
        self.pids: list[int] = []
        self._segment = segment
        self._made = 0

    @property
    def usable(self) -> bool:
        """Whether it may be worth the step to show something: the same at all ranks."""
        return self.can_read or bool(self.regions)

    def add(self, mapping: Mapping) -> Region:
        """Take memory into use, at all ranks in the same order."""
        self._made += 1
        region = self.regions[self._made] = Region(mapping, self._segment.rank, self._segment.size)
        return region

    def locations(self, arrays: Sequence[Typed | None]) -> list[int]:
        """Return what the others are told: two words for each rank, by rank.

        Args:
            arrays: for each rank, by rank, what it may read, contiguous; None, or empty, where that is nothing.
        """
        words: list[int] = []
        last: Typed | None = None
        place = nothing = NOT_EXPOSED, 0
        for array in arrays:
            if array is not last:
                place = self._locate(array) if array is not None and array.size else nothing
                last = array
            words += place
        return words

    def _locate(self, array: Typed) -> tuple[int, int]:
        address = process_vm.address_of(array)
        for number, region in self.regions.items():
            if region.begin <= address < region.end:
                return number, address - region.begin
        return PRIVATE, address

    def expose(self, arrays: Sequence[Typed | None]) -> Exposure:
        """Tell each rank where what is for it lies; ends a step.

        Args:
            arrays: see ``places``.
        """
        segment = self._segment
        row = struct.Struct(f"={2 * segment.size}q")
        segment.slots(_WORD, 0)
        notes = segment.notes()
        row.pack_into(notes[segment.rank], 0, *self.locations(arrays))
        segment.step()
        return Exposure(segment, self, [row.unpack_from(note) for note in notes])

    def probe_reads(self) -> None:
        """Find out, with all others, whether process_vm_readv is allowed; two steps."""
        segment = self._segment
        nonce = np.frombuffer(os.urandom(16), np.uint8)
        mine = np.array([os.getpid(), process_vm.address_of(nonce)], _WORD)
        slots = segment.slots(np.dtype(np.uint8), 32)
        slots[segment.rank][:16] = mine.view(np.uint8)
        slots[segment.rank][16:] = nonce
        segment.step()
        said = [(slot[:16].view(_WORD).tolist(), slot[16:].tobytes()) for slot in slots]
        self.pids = [pid for (pid, _), _ in said]
        allowed = all(process_vm.can_read(pid, address, expected) for (pid, address), expected in said)
        verdicts = segment.slots(np.dtype(np.uint8), 1)
        verdicts[segment.rank][:] = allowed
        segment.step()
        self.can_read = all(verdict[0] for verdict in verdicts)
        segment.step()  # before the nonce goes


class Exposure:
    """What all ranks show in one call.

    Args:
        segment: whose ranks.
        windows: of the segment.
        table: everyone's ``Windows.places``, by rank.
    """

    def __init__(self, segment: Slots, windows: MemoryWindows, table: Sequence[Sequence[int]]) -> None:
        self.mapped = not any(PRIVATE in row[::2] for row in table)
        """Whether all of it is registered."""
        self.readable = self.mapped or windows.can_read
        """Whether every rank can read what is for it: the same at all of them."""
        self.any_exposed = any(region != NOT_EXPOSED for row in table for region in row[::2])
        """Whether there is anything to read for anyone."""
        rank = segment.rank
        self._segment = segment
        self._regions = windows.regions
        self._places = [(row[2 * rank], row[2 * rank + 1]) for row in table]
        self._pids = windows.pids
        self._readers = [reader for reader, region in enumerate(table[rank][::2]) if region != NOT_EXPOSED]

    def has_from(self, owner: int) -> bool:
        """Return whether a rank shows something to this one."""
        return self._places[owner][0] != NOT_EXPOSED

    def view(self, owner: int, like: Typed) -> Typed:
        """Return what a rank shows to this one, if it is registered: of ``like``'s dtype and length."""
        region, offset = self._places[owner]
        if region == NOT_EXPOSED:
            return like[:0]
        return self._regions[region].parts[owner][offset : offset + like.nbytes].view(like.dtype)

    def read(self, owner: int, begin: int, into: Typed, *, owner_idle: bool = False) -> None:
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
        region, where = self._places[owner]
        where += begin * into.itemsize
        if region != PRIVATE:
            into[:] = self._regions[region].parts[owner][where : where + into.nbytes].view(into.dtype)
            return
        try:
            process_vm.read_into(
                self._pids[owner], where, into, parallel=owner_idle and not self._segment.oversubscribed
            )
        except DistNetworkError:
            self._segment.raise_departed(owner)

    def complete(self) -> None:
        """End the last step: this rank has read, and what it showed may change, because its readers have read it.

        Raises:
            DistBackendError: a rank has left the call before, so what was read may be anything.
        """
        self._segment.step(self._readers)
        for owner in self._segment.left_ranks():
            self._segment.raise_departed(owner)
