"""Steps of a group in shared memory, with threads as ranks."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from support.threads import ORDERED, in_threads

from rankmesh_agent.net.spin import CoreContention
from rankmesh_agent.shared_memory import mapping, slots
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.shared_memory.slots import NOTES, CallMismatchError

I8, U1 = np.dtype("int64"), np.dtype("uint8")
SLOT = 4096


def give_up(seconds: float = 10.0):
    """Return a check that ends a wait nobody will end."""
    end = time.monotonic() + seconds

    def check(missing) -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {missing()}")

    return check


@pytest.fixture(params=["crowded", "roomy", ORDERED])
def crowded(request, monkeypatch):
    if request.param == "ordered":
        monkeypatch.setattr(mapping, "TOTAL_STORE_ORDER", False)
    return request.param == "crowded"


@pytest.fixture
def segments(shm, crowded):
    """Return a function that makes a group's segments, one a rank, each with a mapping of its own."""

    def make(size: int, slot_bytes: int = SLOT) -> list[Segment]:
        nbytes = Segment.bytes_for(size, slot_bytes)
        made = Mapping.create(str(shm), "job", nbytes)
        mappings = [made, *(Mapping.open(str(shm), made.name, nbytes) for _ in range(size - 1))]
        made.release()
        return [Segment(mapping, rank, size, slot_bytes, crowded) for rank, mapping in enumerate(mappings)]

    return make


def test_slots_shrink_with_the_ranks_of_the_host():
    """The rings of 128 ranks take 107 MiB: with a world and a group of half of it, less than 256 MiB in all."""
    mib = 1 << 20
    slots = {ranks: Segment.slot_bytes_on_host(mib, ranks) for ranks in (1, 8, 32, 33, 128, 500)}
    assert slots[1] == slots[8] == slots[32] == mib > slots[33] > slots[128] == mib // 4 > slots[500]
    assert all(slot % 4096 == 0 for slot in slots.values())
    assert Segment.bytes_for(128, slots[128]) + Segment.bytes_for(64, slots[128]) < 100 * mib
    assert Segment.bytes_for(500, slots[500]) < 90 * mib
    assert Segment.slot_bytes_on_host(5000, 4) == 5000


def test_who_waits_gives_way_before_it_sleeps(segments, monkeypatch):
    """The other one gets on only when it does, as on a core that they share."""
    one, other = segments(2)
    for each in (one, other):
        each.begin(1, 7, give_up())
    monkeypatch.setattr(slots, "core_contention", CoreContention())
    monkeypatch.setattr(os, "sched_yield", other.step)
    monkeypatch.setattr(slots, "futex_wait", lambda *arguments: pytest.fail("it fell asleep"))
    one.step()
    assert not one.missing()


def test_who_waits_sleeps_at_once_while_other_programs_want_the_cores(segments, monkeypatch):
    one, other = segments(2)
    for each in (one, other):
        each.begin(1, 7, give_up())
    cores = CoreContention()
    monkeypatch.setattr(slots, "core_contention", cores)
    monkeypatch.setattr(cores, "should_spin", lambda: False)
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it gave way"))
    monkeypatch.setattr(slots, "futex_wait", lambda *arguments: other.step())
    one.step()
    assert not one.missing()


def test_everyone_reads_the_notes_of_the_turn_beside_its_slots(segments):
    group = segments(3)

    def take_part(rank: int) -> None:
        segment = group[rank]
        for seq in range(30):
            segment.begin(seq, 1, give_up())
            slots = segment.slots(U1, SLOT)
            slots[rank][:] = 255
            notes = segment.notes()
            assert [len(note) >= NOTES * 8 * 3 for note in notes] == [True] * 3
            notes[rank][:] = bytes([10 * rank + seq % 7]) * len(notes[rank])
            segment.step()
            assert [set(note) for note in notes] == [{10 * other + seq % 7} for other in range(3)]
            assert all((slot == 255).all() for slot in slots), "notes are not part of slots"

    in_threads(3, take_part)


def test_a_step_without_slots_waits_only_for_those_it_is_told(segments):
    group = segments(3)
    come = threading.Event()

    def take_part(rank: int) -> None:
        segment = group[rank]
        for seq in range(20):
            segment.begin(seq, 1, give_up())
            slots = segment.slots(U1, 10)
            slots[rank][:] = 7 * rank + seq
            segment.step()
            assert [slot[0] for slot in slots] == [7 * other + seq for other in range(3)]
            if rank == 2:
                assert come.wait(10), "rank 1 waits for rank 2, although it was told not to"
            segment.step({1: [0], 0: [1, 2], 2: []}[rank])
            if rank == 1:
                come.set()

    in_threads(3, take_part)


def test_a_slot_is_not_overwritten_while_others_read_it(segments):
    group = segments(2)

    def take_part(rank: int) -> None:
        segment = group[rank]
        for seq in range(20):
            segment.begin(seq, 1, give_up())
            slots = segment.slots(I8, 500)
            slots[rank][:] = seq
            segment.step()
            if rank:
                before = slots[0].copy()
                time.sleep(0.002)  # the other one goes on as far as it may
                assert (before == seq).all()
                assert (slots[0] == seq).all()

    in_threads(2, take_part)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_slots_are_apart_from_each_other_and_hold_what_they_should(segments, size):
    group = segments(size, slot_bytes=SLOT)
    for segment in group:
        for turn in range(2):
            for owner, slot in enumerate(segment.slots(U1, SLOT)):
                assert slot.size == SLOT
                if segment.rank == 0:
                    assert not slot.any(), "it overlaps with another slot"
                    slot[:] = 1 + turn * size + owner
                assert (slot == 1 + turn * size + owner).all()
    assert [segment.missing() for segment in group] == [[]] * size, "nor do they overlap with the flags"


def test_views_of_many_kinds_are_the_same_memory(segments):
    (segment,) = segments(1)
    for count in range(300):  # more than are kept
        segment.slots(U1, count)
        (slot,) = segment.slots(I8, count)
        assert slot.shape == (count,)
    views = [segment.slots(I8, 5)[0] for _ in range(2)]
    assert views[0] is not views[1], "turns"
    assert segment.slots(I8, 5)[0] is views[0]


# Disagreement


@pytest.mark.parametrize("stray", [0, 3])
def test_one_who_strays_is_noticed_by_all_and_all_go_on(segments, stray):
    group = segments(4)

    def take_part(rank: int) -> list[int]:
        segment, disagreed = group[rank], []
        for seq in range(30):
            strays = seq % 3 == 1 and rank == stray
            segment.begin(seq, seq + 1000 * strays, give_up())
            if not strays:  # its call has no data: a barrier, say
                slots = segment.slots(I8, 10)
                slots[rank][:] = seq + rank
            try:
                segment.step()
            except CallMismatchError:
                disagreed.append(seq)
            else:
                assert [int(slot[0]) for slot in slots] == [seq + other for other in range(4)]
        return disagreed

    assert in_threads(4, take_part) == [list(range(1, 30, 3))] * 4


def test_only_the_first_step_of_a_call_compares(segments):
    group = segments(2)

    def take_part(rank: int) -> None:
        group[rank].begin(0, 5, give_up())
        group[rank].step()
        group[rank].step()
        group[rank].begin(1, 6 + rank, give_up())
        with pytest.raises(CallMismatchError):
            group[rank].step()
        group[rank].step()

    in_threads(2, take_part)


# Waiting in vain


def test_who_waits_is_woken(segments, monkeypatch):
    monkeypatch.setattr("rankmesh_agent.shared_memory.slots.SLICE_SECONDS", 30.0)
    group = segments(2)
    began = time.monotonic()

    def take_part(rank: int) -> None:
        for seq in range(40):
            if seq % 2 == rank:
                time.sleep(0.005)  # the other one falls asleep
            group[rank].begin(seq, 1, give_up())
            group[rank].step()

    in_threads(2, take_part)
    assert time.monotonic() - began < 29, "no wake-up was missed: a missed one costs a slice of 30 s"


class BoredError(Exception):
    pass


def test_a_check_is_told_who_is_missing_and_can_end_the_wait(segments):
    group = segments(3)
    told = []
    second_arrived = threading.Event()

    def check(missing) -> None:
        told.append(missing())
        if told[-1] == [1, 2]:
            second_arrived.set()
        if told[-1] == [2]:
            raise BoredError

    def take_part(rank: int) -> None:
        if rank == 1:
            assert second_arrived.wait(10)
        if rank < 2:
            group[rank].begin(0, 1, check if rank == 0 else give_up(0))
            with pytest.raises(BoredError if rank == 0 else TimeoutError):
                group[rank].step()

    in_threads(3, take_part)
    assert told[0] == [1, 2]
    assert told[-1] == [2]


def test_the_late_one_finds_the_others_there(segments):
    group = segments(3)
    for rank in (0, 1):
        group[rank].begin(0, 1, give_up(0))
        with pytest.raises(TimeoutError):
            group[rank].step()
    group[2].begin(0, 1, lambda _: pytest.fail("everyone has been here"))
    group[2].step()
    assert group[0].missing() == group[2].missing() == []
