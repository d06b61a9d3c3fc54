"""Segment: a group's shared memory, and the arrays that its ranks expose to each other without copies through slots.

*Registered* arrays lie in shared memory that all ranks have mapped. Other arrays can be read with process_vm_readv if
the kernel allows it. Before the first read, each rank publishes the locations of its exposed arrays::

    note of rank r     for each rank, by rank: region and offset in it, or PRIVATE and address, or NOT_EXPOSED and 0
                       (8 bytes each)

A rank may change an exposed array when its readers have reported that they have read it: ``complete``. A rank that
leaves the call earlier, on an error or Ctrl-C, reports that, too; all bytes read in this call are then invalid. It then
makes its registered arrays private: a rank that is late would still write its part of the result into them.
"""

from __future__ import annotations

import logging
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from mmap import PAGESIZE
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.shared_memory import process_vm
from rankmesh_agent.shared_memory.mapping import Mapping, make_private
from rankmesh_agent.shared_memory.slots import Slots
from rankmesh_agent.wire.errors import DistNetworkError

_log = logging.getLogger("rankmesh")
Typed = npt.NDArray[Any]
T = TypeVar("T")
_WORD = np.dtype(np.uint64)
PRIVATE, NOT_EXPOSED = 0, -1
"""Values in place of a region's number; these numbers start at 1."""
Process = tuple[int, int, bytes]
_NONCE = np.frombuffer(os.urandom(16), np.uint8)
"""Bytes that no other process has at this address but children, which have other pids."""
_MAX_DECODED, _MAX_NOTES_BYTES = 64, 1 << 14
"""Most sets of notes whose contents are kept decoded, and the bytes of the largest: those of some 20 ranks."""


class Region:
    """Registered memory: an array for each rank, all of the same size."""

    def __init__(self, mapping: Mapping, rank: int, size: int) -> None:
        stride = mapping.bytes.size // size
        self.parts = [mapping.bytes[owner * stride : (owner + 1) * stride] for owner in range(size)]
        self.begin = mapping.address + rank * stride
        self.end = self.begin + stride
        self._own: weakref.ref[Typed] | None = None

    @staticmethod
    def bytes_for(size: int, nbytes: int) -> int:
        """Return the size in bytes of a region with an array of ``nbytes`` for each rank."""
        return size * max(PAGESIZE, -(-nbytes // PAGESIZE) * PAGESIZE)

    def own_array(self, rank: int, nbytes: int) -> Typed:
        """Return this rank's array, as bytes; the region is in use as long as the array or a view of it exists."""
        own = np.frombuffer(self.parts[rank].data, np.uint8)[:nbytes]
        base = own.base  # the base that NumPy gives to every view
        assert isinstance(base, np.ndarray)
        self._own = weakref.ref(base)
        return own

    @property
    def in_use(self) -> bool:
        """True if this rank's array, or a view of it, still exists."""
        return self._own is not None and self._own() is not None


class Exposure(NamedTuple):
    """Memory that all ranks expose in one call, from the view of one of them.

    Attributes:
        mapped: whether all exposed arrays are registered.
        any_exposed: whether any array is exposed to any rank.
        locations: those of the arrays exposed to this rank, by owner.
        readers: the ranks to which this one exposes an array.
    """

    mapped: bool
    any_exposed: bool
    locations: list[tuple[int, int]]
    readers: frozenset[int]

    @classmethod
    def of(cls, rank: int, rows: Sequence[Sequence[int]]) -> Exposure:
        """Return the exposure from the view of a rank, given ``Segment.locations`` of all ranks, by rank."""
        return cls(
            not any(PRIVATE in row[::2] for row in rows),
            any(region != NOT_EXPOSED for row in rows for region in row[::2]),
            [(row[2 * rank], row[2 * rank + 1]) for row in rows],
            frozenset(reader for reader, region in enumerate(rows[rank][::2]) if region != NOT_EXPOSED),
        )

    def has_from(self, owner: int) -> bool:
        """Return whether a rank exposes an array to this one."""
        return self.locations[owner][0] != NOT_EXPOSED


class Segment(Slots):
    """One rank's view of its group's shared memory; see Slots. The last reference, and the last array, unmap it.

    Attributes:
        can_read: whether every rank may read the memory of every other rank; the same at all ranks.
        regions: registered memory by number; the same at all ranks.
        processes: the pids of all ranks, by rank, each with the address of a nonce and the nonce; see can_read.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int, slot_bytes: int, oversubscribed: bool) -> None:
        super().__init__(mapping, rank, size, slot_bytes, oversubscribed)
        self.can_read = False
        self.regions: dict[int, Region] = {}
        self.processes: Sequence[Process] = ()
        self._region_count = 0
        self._read: set[int] = set()
        """The ranks whose private memory this one has read in this call."""
        self._decoded: dict[tuple[Callable[..., Any], bytes], Any] = {}

    @property
    def usable(self) -> bool:
        """True if any array can be exposed, which justifies a step for it; the same at all ranks."""
        return self.can_read or bool(self.regions)

    def add_region(self, mapping: Mapping) -> Region:
        """Register a region; all ranks register their regions in the same order."""
        self._region_count += 1
        region = self.regions[self._region_count] = Region(mapping, self.rank, self.size)
        return region

    def locations(self, arrays: Sequence[Typed | None]) -> list[int]:
        """Return the note that publishes ``arrays``: two words for each rank, by rank.

        Args:
            arrays: the array that each rank may read, by rank, contiguous; None or empty for none.
        """
        words: list[int] = []
        last: Typed | None = None
        location = none = NOT_EXPOSED, 0
        for array in arrays:
            if array is not last:
                location = self._locate(array) if array is not None and array.size else none
                last = array
            words += location
        return words

    def _locate(self, array: Typed) -> tuple[int, int]:
        address = process_vm.address_of(array)
        for number, region in self.regions.items():
            if region.begin <= address < region.end:
                return number, address - region.begin
        return PRIVATE, address

    def make_arrays_private(self, arguments: Iterable[Any]) -> None:
        """Replace this rank's registered arrays among a failed call's arguments by memory of this process alone.

        The arrays keep their addresses, and their contents if there is memory for a copy; what late ranks write does
        not reach them.
        """
        if not self.regions:
            return
        for argument in arguments:
            for array in argument if isinstance(argument, list | tuple) else [argument]:
                if isinstance(array, np.ndarray) and array.size and self._locate(array)[0] != PRIVATE:
                    address = process_vm.address_of(array)
                    begin = address // PAGESIZE * PAGESIZE
                    end = -(-(address + array.nbytes) // PAGESIZE) * PAGESIZE
                    try:
                        with interrupts_deferred():
                            if not make_private(begin, end - begin):
                                _log.error("a registered array of a call that failed is zero now: no memory for a copy")
                    except OSError as error:
                        _log.error("a rank that is late can still write into a registered array: %s", error)

    def expose(self, arrays: Sequence[Typed | None]) -> Exposure:
        """Publish the location of each rank's array, see ``locations``; ends a step."""
        row = _row(self.size)
        self.slots(_WORD, 0)
        notes = self.notes()
        row.pack_into(notes[self.rank], 0, *self.locations(arrays))
        self.step()
        return self.decoded(_exposure_of, notes)

    def is_readable(self, exposure: Exposure) -> bool:
        """Return whether every rank can read the arrays exposed to it; the same at all ranks."""
        return exposure.mapped or self.can_read

    def decoded(self, decode: Callable[[int, Sequence[memoryview]], T], notes: Sequence[memoryview]) -> T:
        """Return the result of a function of this rank and the notes of all ranks.

        A program that repeats a call mostly has the same arrays again: then the function is not called.
        """
        key = decode, b"".join(notes)
        if key in self._decoded:
            found: T = self._decoded[key]
            return found
        found = decode(self.rank, notes)
        if len(key[1]) <= _MAX_NOTES_BYTES:
            if len(self._decoded) >= _MAX_DECODED:
                self._decoded.clear()
            self._decoded[key] = found
        return found

    def view(self, exposure: Exposure, owner: int, like: Typed) -> Typed:
        """Return the registered array that a rank exposes to this one, with the dtype and length of ``like``."""
        region, offset = exposure.locations[owner]
        if region == NOT_EXPOSED:
            return like[:0]
        return self.regions[region].parts[owner][offset : offset + like.nbytes].view(like.dtype)

    def read(self, exposure: Exposure, owner: int, begin: int, into: Typed, *, owner_idle: bool = False) -> None:
        """Fill ``into`` from element ``begin`` of the array that a rank exposes to this one.

        Args:
            owner_idle: whether the owner only waits meanwhile, so that its core is free.

        Raises:
            DistBackendError: the rank is gone.
        """
        if not into.size:
            return
        region, start = exposure.locations[owner]
        start += begin * into.itemsize
        if region != PRIVATE:
            into[:] = self.regions[region].parts[owner][start : start + into.nbytes].view(into.dtype)
            return
        self._read.add(owner)
        try:
            process_vm.read_into(self.processes[owner][0], start, into, parallel=owner_idle and not self.oversubscribed)
        except DistNetworkError:
            self.raise_departed(owner)

    def complete(self, exposure: Exposure) -> None:
        """End the last step: all reads of this rank's arrays have ended, so it may change them.

        Raises:
            DistBackendError: a rank has left the call before its end, so the bytes read from it may be invalid.
        """
        read, self._read = self._read, set()
        # The pid of a rank that is gone may be another process's by now.
        gone = [owner for owner in read if not process_vm.can_read(*self.processes[owner])]
        self.step(exposure.readers)
        for owner in self.left_ranks() + gone:
            self.raise_departed(owner)

    def allow_reads(self, processes: Sequence[Process]) -> None:
        """Let the ranks read each other's memory, as a probe among these processes has found that they may."""
        self.processes, self.can_read = processes, True

    def probe_reads(self) -> None:
        """Find out whether process_vm_readv is allowed between all ranks; a collective call of two steps."""
        slots = self.slots(_WORD, 4)
        slots[self.rank][:] = os.getpid(), process_vm.address_of(_NONCE), *_NONCE.view(_WORD)
        self.step()
        self.processes = [(int(slot[0]), int(slot[1]), slot[2:].tobytes()) for slot in slots]
        verdicts = self.slots(np.dtype(np.uint8), 1)
        verdicts[self.rank][:] = all(process_vm.can_read(*process) for process in self.processes)
        self.step()
        self.can_read = all(verdict[0] for verdict in verdicts)


def _exposure_of(rank: int, notes: Sequence[memoryview]) -> Exposure:
    row = _row(len(notes))
    return Exposure.of(rank, [row.unpack_from(note) for note in notes])


@cache
def _row(size: int) -> struct.Struct:
    """Return the layout of ``Segment.locations``."""
    return struct.Struct(f"={2 * size}q")
