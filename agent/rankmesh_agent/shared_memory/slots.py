"""Slots of a group's shared memory: a flag and two slots for each rank.

::

    line r             rank r: steps posted, the fingerprints of its two latest calls, whether a rank sleeps until it
                       posts, whether it has left a call before its end (8 bytes each)
    line-aligned       notes, NOTES words for each rank: [turn 0: rank 0, rank 1, …] [turn 1: rank 0, rank 1, …]
    4096-aligned       slots: [turn 0: rank 0, rank 1, …] [turn 1: rank 0, rank 1, …]

In a *step* a rank writes into its own slot or note, increments its count, wakes the ranks that sleep on it, and waits
until every count has reached the same value. Slots and notes alternate between two turns, so one wait for each step is
enough: before a rank writes a slot again, it has passed the wait of the step between, so all others have finished
reading.

A wakeup is a system call, so a rank makes it only for sleepers. Before it sleeps, a rank sets the sleepers flag, checks
the count again and sleeps; a rank that posts stores the count and checks the flag. Both place a lock operation in
between, which x86 executes as a full fence, so one of the two sees the other's store; Mapping.words has the order that
other processors do not keep. The flag is cleared before the count is stored: later, it may be that of a rank which has
seen the count and sleeps until the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rankmesh_agent.native import core
from rankmesh_agent.net.fork import reset_after_fork
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.shared_memory.mapping import CACHE_LINE, Mapping, futex_wait, futex_wake, timespec_of
from rankmesh_agent.wire.errors import DistBackendError

_PAGE = 4096
_WORDS = CACHE_LINE // 8
_SLEEPERS, _LEFT = 3, 4
"""Words of a line; word 0 is the count, words 1 and 2 are fingerprints."""
_DETECTION_SECONDS = 2.0
"""Maximum delay until the failure of a rank that has left a call is detected."""
_MIN_LANE_BYTES = 64
_FULL_SLOTS = 32
"""Ranks on a host beyond which slots shrink."""
NOTES = 4
"""Words for each rank in a rank's note."""
_CHUNK_BYTES = 1 << 19
"""Of what is copied through a slot at a time: both turns of the slots stay in the cache. Between 2 ranks, copies of
1 MiB at a time took up to twice as long, those of 128 KiB a tenth longer."""
_YIELDS = 20
"""Checks before a rank on an oversubscribed host sleeps, each before a yield of the core."""
_SPIN_ROUNDS, _SPINS = 64, 16
"""Rounds before a rank with a core of its own sleeps, and checks in each round, which ends with a yield of the core:
other threads of the host, those of the ranks included, may occupy the core of the awaited rank. Fewer yields are no
faster, and a yield after every check costs a system call as long as the wait."""
_fence = reset_after_fork(threading.Lock())
_STEP_BITS = 20
"""More steps than 2**20 in each of a group's calls so far would make ``restart`` count backwards."""
SLICE_SECONDS = 0.05
"""Maximum duration of one sleep: between two sleeps, Ctrl-C, aborts, failed peers and the deadline are detected."""

Typed = npt.NDArray[Any]
Check = Callable[[Callable[[], list[int]]], None]


class CallMismatchError(Exception):
    """The ranks of a group have made different calls. The caller adds the call of each rank."""


class Slots(object if core is None else core.Slots):  # type: ignore[misc]  # of _steps and _turn, which it changes, too
    """One rank's view of its group's shared memory.

    Args:
        mapping: memory of ``bytes_for(...)`` bytes, initially zero.
        oversubscribed: whether the host has more ranks than cores: a rank that waits then yields its core.

    Attributes:
        chunk_bytes: most bytes that are copied through a slot at a time; the same at all ranks.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int, slot_bytes: int, oversubscribed: bool) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes
        self.chunk_bytes = min(slot_bytes, _CHUNK_BYTES)
        self.mapping = mapping
        self._words = mapping.words(0, size * CACHE_LINE)
        self._addresses = [mapping.address + rank * CACHE_LINE for rank in range(size)]
        self._address = self._addresses[rank]
        self._own_line = rank * _WORDS
        self._others = [(other * _WORDS, other) for other in range(size) if other != rank]
        self.oversubscribed = oversubscribed
        self._steps = 0
        self._turn = 0
        self._slice = timespec_of(SLICE_SECONDS)
        self._word = 1
        self._fingerprint = 0
        self._compared = True
        self._check: Check = _never
        note = _note_bytes(size)
        self._notes = [
            [mapping.bytes.data[begin : begin + note] for begin in range(first, first + size * note, note)]
            for first in (size * CACHE_LINE, size * (CACHE_LINE + note))
        ]
        begin, turn_bytes = _head_bytes(size), size * slot_bytes
        self._slots = [
            [mapping.bytes[at : at + slot_bytes] for at in range(first, first + turn_bytes, slot_bytes)]
            for first in (begin, begin + turn_bytes)
        ]
        self._views: tuple[dict[Any, list[Typed]], dict[Any, list[Typed]]] = ({}, {})
        self._scratch = np.empty(0, np.uint8)

    @staticmethod
    def slot_bytes_on_host(slot_bytes: int, ranks: int) -> int:
        """Return the bytes of a slot on a host with so many ranks, given those on a host with few.

        However many they are, a group of all of them takes no more memory than one of _FULL_SLOTS. The slots of smaller
        groups shrink as well: all ranks of the host may be in such groups.
        """
        return min(slot_bytes, _round_up(slot_bytes * _FULL_SLOTS // ranks))

    @staticmethod
    def min_slot_bytes(size: int) -> int:
        """Return the smallest slot in which every rank has a lane, whatever the dtype."""
        return _round_up(size * _MIN_LANE_BYTES)

    @staticmethod
    def bytes_for(size: int, slot_bytes: int) -> int:
        """Return the size in bytes of the memory for ``size`` ranks."""
        return _head_bytes(size) + 2 * size * slot_bytes

    def lane(self, dtype: np.dtype[Any]) -> int:
        """Return the number of elements for each rank in a slot that is split evenly."""
        return self.slot_bytes // (dtype.itemsize * self.size)

    def chunk(self, dtype: np.dtype[Any]) -> int:
        """Return the number of elements that are copied through a slot at a time."""
        return self.chunk_bytes // dtype.itemsize

    def slots(self, dtype: np.dtype[Any], count: int) -> list[Typed]:
        """Begin a step; return the slots of all ranks in the next turn, by rank, as arrays of ``count`` elements."""
        turn = self._turn = self._turn ^ 1
        known = self._views[turn]
        views = known.get((dtype, count))
        if views is None:
            if len(known) > 64:
                known.clear()
            nbytes = count * dtype.itemsize
            views = known[dtype, count] = [slot[:nbytes].view(dtype) for slot in self._slots[turn]]
        return views

    def current_slots(self, dtype: np.dtype[Any], count: int) -> list[Typed]:
        """Return the slots of all ranks in the current turn, as ``slots`` does for the next one."""
        self._turn ^= 1
        return self.slots(dtype, count)

    def notes(self) -> list[memoryview]:
        """Return the notes of all ranks in the current turn, by rank, as bytes: NOTES words for each rank."""
        return self._notes[self._turn]

    def scratch(self, dtype: np.dtype[Any], count: int) -> Typed:
        """Return private scratch memory, which is valid until the next call of this method; it is allocated once."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    def begin(self, seq: int, fingerprint: int, check: Check) -> None:
        """Begin call number ``seq``; its first ``step`` compares the fingerprints of all ranks.

        Args:
            seq: the call's number, the same at all ranks.
            check: called every SLICE_SECONDS of a wait with a function that returns the missing ranks; it raises to
                end the wait.
        """
        self._word = 1 + (seq & 1)  # other ranks may still read the previous call's fingerprint
        self._words[self._own_line + self._word] = fingerprint
        self._fingerprint = fingerprint
        self._compared = False
        self._check = check

    def step(self, wait_for: Container[int] | None = None) -> None:
        """End a step: publish this rank's slot, and wait until the slots of the other ranks can be read.

        Args:
            wait_for: the ranks to wait for, in a step without slots that is not the first of a call; None: all.

        Raises:
            CallMismatchError: the ranks have made different calls; raised in a call's first step.
        """
        self._steps = steps = self._steps + 1
        words, own = self._words, self._own_line
        if sleepers := words[own + _SLEEPERS]:
            words[own + _SLEEPERS] = 0
        words[own] = steps
        with _fence:
            pass
        if sleepers or words[own + _SLEEPERS]:
            futex_wake(self._address)
        if wait_for is not None:
            for line, other in self._others:
                if other in wait_for and words[line] < steps:
                    self._wait(line, other, steps)
            return
        for line, other in self._others:
            if words[line] < steps:
                self._wait(line, other, steps)
        if not self._compared:
            self._compared = True
            word, fingerprint = self._word, self._fingerprint
            for line, _ in self._others:
                if words[line + word] != fingerprint:
                    self._turn = 0  # different calls may have left different turns; no rank reads a slot now
                    raise CallMismatchError

    def _wait(self, line: int, other: int, steps: int) -> None:
        words = self._words
        # A sleep and a wakeup take longer than most steps: spin first.
        if core_contention.should_spin():
            rounds, looks = (_YIELDS, 1) if self.oversubscribed else (_SPIN_ROUNDS, _SPINS)
            for _ in range(rounds):
                for _ in range(looks):
                    if words[line] >= steps:
                        return
                if not core_contention.yield_core():
                    break
        address = self._addresses[other]
        while True:
            words[line + _SLEEPERS] = 1
            with _fence:
                pass
            if (count := words[line]) >= steps:
                return
            futex_wait(address, count, self._slice)
            if words[line] == count:
                self._check(self.missing)

    def restart(self, seq: int) -> None:
        """Begin anew after call number ``seq``, which the ranks have left in different steps; all have left it."""
        self._steps = (seq + 1) << _STEP_BITS
        self._turn = 0

    def mark_left(self) -> None:
        """Record that this rank has left a call before its end: the group has failed."""
        self._words[self._own_line + _LEFT] = 1

    def left_ranks(self) -> list[int]:
        """Return the group ranks that have left a call before its end."""
        return [other for line, other in self._others if self._words[line + _LEFT]]

    def raise_departed(self, other: int) -> NoReturn:
        """Raise the error that explains a rank's departure from the call, once it is known."""
        end = time.monotonic() + _DETECTION_SECONDS
        while time.monotonic() < end:
            self._check(lambda: [other])
            time.sleep(_DETECTION_SECONDS / 1000)
        raise DistBackendError(
            f"group rank {other} left the call, or its memory could no longer be read; no reason given"
        )

    def missing(self) -> list[int]:
        """Return the group ranks that have not reached this step."""
        return [other for line, other in self._others if self._words[line] < self._steps]


def _never(missing: Callable[[], list[int]]) -> None:
    raise AssertionError("a step outside a call")


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _note_bytes(size: int) -> int:
    return -(-NOTES * 8 * size // CACHE_LINE) * CACHE_LINE


def _head_bytes(size: int) -> int:
    """Return the bytes of all lines and notes."""
    return _round_up(size * (CACHE_LINE + 2 * _note_bytes(size)))
