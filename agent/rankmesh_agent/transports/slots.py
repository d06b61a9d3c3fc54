"""Shared memory of a whole group: a flag and two slots a rank.

::

    line r             rank r: steps posted, the fingerprints of its two latest calls, whether anyone sleeps until it
                       posts, whether it has left a call half-way (8 bytes each)
    line-aligned       notes, NOTES words for each rank: [turn 0: rank 0, rank 1, …] [turn 1: rank 0, rank 1, …]
    4096-aligned       slots: [turn 0: rank 0, rank 1, …] [turn 1: rank 0, rank 1, …]

A *step* is: write into your own slot, or note, count up your flag and wake whoever sleeps on it, wait until every flag
has reached the count. Slots and notes are used in turn, which makes one wait a step enough: before a rank can write a
slot again it has passed the wait of the step between, so all others have finished reading.

Waking is a system call, so who goes to sleep says so first: it raises 'anyone sleeps', looks at the count again and
sleeps; who posts stores the count and looks at 'anyone sleeps'. Both put a lock operation in between, which x86
executes as a full fence, so one of the two sees the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rankmesh_agent.transports.shared_memory import CACHE_LINE, Mapping, futex_wait, futex_wake, timespec_of
from rankmesh_agent.wire.errors import DistBackendError

_PAGE = 4096
_WORDS = CACHE_LINE // 8
_ASLEEP, _LEFT = 3, 4
"""Which word of a line: 0 is the count, 1 and 2 are fingerprints."""
_SUSPECT_SECONDS = 2.0
"""How long a rank that has left a call may take to be known as failed."""
_LEAST_LANE = 64
NOTES = 4
"""Words of a rank's note for each rank."""
_YIELDS = 20
"""How often a rank that shares its core looks before it sleeps, each time after the others had their turn."""
_ROUNDS, _LOOKS = 64, 16
"""How often where the core is its own, and how often of these before it offers the core: what else runs on the host,
threads of the ranks' own among it, may keep the one that is waited for from its core. More seldom is no better there,
and every time would cost a system call as long as the wait."""
_fence = threading.Lock()
SLICE_SECONDS = 0.05
"""How long a sleep lasts at most: between two of them Ctrl-C, aborts, dead peers and the deadline are noticed."""

Typed = npt.NDArray[Any]
Check = Callable[[Callable[[], list[int]]], None]


class CallMismatchError(Exception):
    """The ranks of a group did not make the same call. For the engine, which says who called what."""


class Slots:
    """One rank's view of its group's shared memory.

    Args:
        mapping: memory of ``size_of(...)`` bytes, zero at first.
        rank: this rank in the group.
        size: ranks in the group.
        slot_bytes: bytes of a slot.
        crowded: whether the host has more ranks than cores: then a rank that waits gives its core away.

    Attributes:
        crowded: see above.
        mapping: the memory.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int, slot_bytes: int, oversubscribed: bool) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes
        self.mapping = mapping
        self._words = mapping.bytes.data[: size * CACHE_LINE].cast("Q")
        self._addresses = [mapping.address + rank * CACHE_LINE for rank in range(size)]
        self._address = self._addresses[rank]
        self._mine = rank * _WORDS
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
        begin = _head_bytes(size)
        self._slots = [
            [_slot(mapping, begin, (turn * size + owner) * slot_bytes, slot_bytes) for owner in range(size)]
            for turn in range(2)
        ]
        self._views: tuple[dict[Any, list[Typed]], dict[Any, list[Typed]]] = ({}, {})
        self._scratch = np.empty(0, np.uint8)

    @staticmethod
    def min_slot_bytes(size: int) -> int:
        """Return the smallest slot in which every rank has a lane, whatever the dtype."""
        return _round_up(size * _LEAST_LANE)

    @staticmethod
    def bytes_for(size: int, slot_bytes: int) -> int:
        """Return the bytes a segment for ``size`` ranks takes."""
        return _head_bytes(size) + 2 * size * slot_bytes

    def lane(self, dtype: np.dtype[Any]) -> int:
        """Return how many elements of a slot each rank gets when it is split evenly."""
        return self.slot_bytes // (dtype.itemsize * self.size)

    def slots(self, dtype: np.dtype[Any], count: int) -> list[Typed]:
        """Return everyone's slots of the next turn as arrays of ``count`` elements, by rank. Begins a step."""
        turn = self._turn = self._turn ^ 1
        known = self._views[turn]
        views = known.get((dtype, count))
        if views is None:
            if len(known) > 64:
                known.clear()
            nbytes = count * dtype.itemsize
            views = known[dtype, count] = [slot[:nbytes].view(dtype) for slot in self._slots[turn]]
        return views

    def notes(self) -> list[memoryview]:
        """Return everyone's notes of the turn that ``slots`` began, as bytes, by rank: NOTES words for each rank."""
        return self._notes[self._turn]

    def scratch(self, dtype: np.dtype[Any], count: int) -> Typed:
        """Return an array of this rank's own to work in, until the next one is asked for; made once."""
        nbytes = count * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    def begin(self, seq: int, fingerprint: int, check: Check) -> None:
        """Begin call number ``seq``: its first ``step`` compares everyone's fingerprint.

        Args:
            seq: the call's number, counted the same at all ranks.
            fingerprint: of the call.
            check: called with what tells the ranks still missing, every SLICE_SECONDS of a wait; it raises to end it.
        """
        self._word = 1 + (seq & 1)  # the previous call's fingerprint may still be looked at
        self._words[self._mine + self._word] = fingerprint
        self._fingerprint = fingerprint
        self._compared = False
        self._check = check

    def step(self, wait_for: Container[int] | None = None) -> None:
        """End a step: show the others what was written to the slot, and wait until theirs can be read.

        Args:
            wait_for: in a step without slots, not the first of a call, the ranks whose word counts here; None: all.

        Raises:
            CallMismatchError: in a call's first step, when the ranks did not make the same call.
        """
        self._steps = steps = self._steps + 1
        words, mine = self._words, self._mine
        words[mine] = steps
        with _fence:
            pass
        if words[mine + _ASLEEP]:
            words[mine + _ASLEEP] = 0
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
                    self._turn = 0  # different calls may have left it different; nobody reads a slot now
                    raise CallMismatchError

    def _wait(self, line: int, other: int, steps: int) -> None:
        words = self._words
        # Falling asleep and being woken takes longer than most steps: look around a little before.
        if self.oversubscribed:
            for _ in range(_YIELDS):
                os.sched_yield()
                if words[line] >= steps:
                    return
        else:
            for _ in range(_ROUNDS):
                for _ in range(_LOOKS):
                    if words[line] >= steps:
                        return
                os.sched_yield()
        address = self._addresses[other]
        while True:
            words[line + _ASLEEP] = 1
            with _fence:
                pass
            if (seen := words[line]) >= steps:
                return
            futex_wait(address, seen, self._slice)
            if words[line] == seen:
                self._check(self.missing)

    def mark_left(self) -> None:
        """Tell the others that this rank has left a call half-way: the group has failed."""
        self._words[self._mine + _LEFT] = 1

    def left_ranks(self) -> list[int]:
        """Return the group ranks that have left a call half-way."""
        return [other for line, other in self._others if self._words[line + _LEFT]]

    def raise_departed(self, other: int) -> NoReturn:
        """Raise why a rank is not in the call any more, as soon as that is known.

        Raises:
            DistBackendError: the rank failed, left, or gave up.
        """
        end = time.monotonic() + _SUSPECT_SECONDS
        while time.monotonic() < end:
            self._check(lambda: [other])
            time.sleep(_SUSPECT_SECONDS / 1000)
        raise DistBackendError(
            f"group rank {other} left the call, or its memory could no longer be read; no reason given"
        )

    def missing(self) -> list[int]:
        """Return the group ranks that have not come as far as this one."""
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


def _slot(mapping: Mapping, begin: int, offset: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
    return mapping.bytes[begin + offset : begin + offset + slot_bytes]
