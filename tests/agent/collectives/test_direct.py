"""The algorithms that read the other ranks' memory where it lies: registered arrays, and process_vm_readv."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sweep.media import Pool
from support.threads import NOW, SHM, World, world

from rankmesh_agent.collectives import all_to_all
from rankmesh_agent.collectives.select import TABLE
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.shared_memory import process_vm, segment, slots
from rankmesh_agent.shared_memory.segment import Exposure, Segment
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]

SLOT_BYTES = 1 << 14
FLOAT32 = np.dtype(np.float32)
PLACES = ("registered", "mixed", "ordinary")
"""Where the ranks' arrays are: all registered, only those of ranks with even numbers, none."""


def segment_of(members: LocalCommunicator) -> Segment:
    found: Segment = members.queue.backend.segment  # type: ignore[attr-defined]
    return found


class Places:
    """A world whose ranks put their arrays where the parameters say."""

    def __init__(self, made: World, where: str) -> None:
        self.world = made
        self.size = made.size
        self._where = where
        self._pools: dict[int, Pool] = {}
        if where != "ordinary":
            made.run(lambda members: self._pools.__setitem__(members.rank, Pool(members)))

    def run(self, function: Callable[[LocalCommunicator, Callable[[Array], Array]], Any]) -> list[Any]:
        """Call ``function`` at every rank with what puts an array in its place."""

        def call(members: LocalCommunicator) -> Any:
            pool = self._pools.get(members.rank)
            if pool is None or (self._where == "mixed" and members.rank % 2):
                return function(members, np.copy)
            return function(members, pool.put)

        return self.world.run(call)


@pytest.fixture(scope="module")
def short_rows() -> Iterator[None]:
    """Have the table take the algorithms for long arrays from two slots on, so that short ones see them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all, "_LONG", SLOT_BYTES)
        patch.setattr(all_to_all, "_LONG_READS", 0)
        for (kind, medium), (first, *rest) in TABLE.items():
            if medium == "reads":
                patch.setitem(TABLE, (kind, medium), (first._replace(limits={2: 2 * SLOT_BYTES}), *rest))
        yield


@pytest.fixture(
    scope="module",
    params=[(n, where, reads) for n in (2, 3) for where in PLACES for reads in (True, False)],
    ids=lambda p: f"{p[0]}-{p[1]}-{'reads' if p[2] else 'may-not-read'}",
)
def places(request: pytest.FixtureRequest, short_rows: None) -> Iterator[Places]:
    size, where, reads = request.param
    with world(size, "segment", slot_bytes=SLOT_BYTES) as made:
        for members in made.communicators:
            assert segment_of(members).can_read, "threads of one process may read each other's memory"
            segment_of(members).can_read = reads
            members.queue._plans.clear()
        yield Places(made, where)


def test_outputs_that_overlap_the_inputs(places: Places) -> None:
    count = 6000

    def call(members: LocalCommunicator, put: Callable[[Array], Array]) -> None:
        rank, size = members.rank, members.size
        whole = put(np.repeat(np.arange(size, dtype=FLOAT32) + 10 * rank, count))
        parts = [whole[other * count : (other + 1) * count] for other in range(size)]
        members.reduce_scatter(parts[rank], parts, ReduceOp.SUM, NOW)
        assert (parts[rank] == size * rank + 10 * sum(range(size))).all()
        parts[rank][:] = rank
        members.all_gather(parts, parts[rank], NOW)
        assert (whole == np.repeat(np.arange(size), count)).all()
        members.all_gather(parts, parts[0], NOW)  # what is sent is overwritten by what comes
        assert (whole == 0).all()
        members.scatter(parts[1], parts if rank == 0 else [], 0, NOW)
        whole[:] = np.repeat(np.arange(size, dtype=FLOAT32) + 10 * rank, count)
        members.all_to_all(parts, parts, NOW)
        assert (whole == np.repeat(10 * np.arange(size) + rank, count)).all()

    places.run(call)


def test_reduce_scatter_in_place_copies_no_input(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is this rank's own input, as in NCCL's in-place form."""
    exposed: dict[threading.Thread, list[Array]] = {}
    expose = Segment.expose

    def recorded(self: Segment, arrays: list[Array]) -> Exposure:
        exposed[threading.current_thread()] = arrays
        return expose(self, arrays)

    def call(members: LocalCommunicator, put: Callable[[Array], Array]) -> None:
        whole = put(np.ones(20_000 * members.size, FLOAT32))
        parts = np.split(whole, members.size)
        members.reduce_scatter(parts[members.rank], parts, ReduceOp.SUM, NOW)
        assert (parts[members.rank] == members.size).all()
        if segment_of(members).usable:
            arrays = exposed[threading.current_thread()]
            assert [array.ctypes.data for array in arrays] == [part.ctypes.data for part in parts]

    monkeypatch.setattr(Segment, "expose", recorded)
    places.run(call)


def test_arrays_that_change_from_call_to_call(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_MAX_DECODED", 3)

    def call(members: LocalCommunicator, put: Callable[[Array], Array]) -> None:
        size = members.size
        pairs = [[[put(np.full(2 * SLOT_BYTES, 0, np.uint8)) for _ in range(size)] for _ in range(2)] for _ in range(3)]
        for number in range(12):
            outputs, inputs = pairs[number % 3]
            for to, part in enumerate(inputs):
                part[:] = 10 * members.rank + to + number
            members.all_to_all(outputs, inputs, NOW)
            assert [set(output) for output in outputs] == [
                {10 * owner + members.rank + number} for owner in range(size)
            ]
            members.broadcast(inputs[0], number % size, NOW)
            assert set(inputs[0]) == {10 * (number % size) + number}

    places.run(call)
    assert all(len(segment_of(members)._decoded) <= 3 for members in places.world.communicators)


# Registered memory


@pytest.fixture
def pair() -> Iterator[World]:
    with world(2, "segment", slot_bytes=SLOT_BYTES) as made:
        yield made


def test_memory_that_nobody_uses_any_more_is_given_back(pair: World) -> None:
    def call(members: LocalCommunicator) -> tuple[int, ...]:
        sizes = []
        kept = members.empty(FLOAT32, 10_000, NOW)
        for _ in range(20):
            view = members.empty(FLOAT32, 10_000, NOW)[5:].reshape(5, -1)
            sizes.append(len(segment_of(members).regions))
            if members.rank == 0:
                del view
        kept[:] = 1
        members.all_reduce(kept, ReduceOp.SUM, NOW)
        assert (kept == 2).all()
        return tuple(sizes)

    numbers = pair.run(call)
    assert numbers[0] == numbers[1] == (2,) + (3,) * 19


def test_registered_memory_has_no_name_once_all_have_it(pair: World) -> None:
    def call(members: LocalCommunicator) -> None:
        array = members.empty(FLOAT32, 10_000, NOW)
        assert len(segment_of(members).regions) == 1
        array[:] = members.rank
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == 1).all()

    pair.run(call)
    assert not list(Path(SHM).glob(f"*-{os.getpid()}.*"))


def test_no_room_is_told_at_every_rank_and_the_group_goes_on(pair: World) -> None:
    def call(members: LocalCommunicator) -> str:
        with pytest.raises(DistError, match="has no room for") as caught:
            members.empty(FLOAT32, 1 << 45, NOW)
        array = np.ones(3, np.float32)
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == 2).all()
        return str(caught.value)

    first, second = pair.run(call)
    assert first == second
    assert "group rank 0" in first


def test_who_only_reads_does_not_wait_for_the_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Event()
    read = Segment.read

    def late(self: Segment, *arguments: Any, **options: Any) -> None:
        if threading.current_thread() in slow:
            assert returned.wait(10)
        read(self, *arguments, **options)

    slow: list[threading.Thread] = []

    def call(members: LocalCommunicator) -> None:
        array = members.empty(FLOAT32, 70_000, NOW)
        array[:] = members.rank
        members.barrier(NOW)
        if members.rank == 2:
            slow.append(threading.current_thread())
        members.broadcast(array, 0, NOW)
        if members.rank == 1:
            returned.set()
        assert (array == 0).all()
        array[:] = 5  # also at the root: all have read it

    monkeypatch.setattr(Segment, "read", late)
    with world(3, "segment", slot_bytes=SLOT_BYTES) as made:
        made.run(call)


@pytest.mark.usefixtures("short_rows")
def test_outputs_that_overlap_what_a_slow_rank_has_yet_to_read(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 begins to read when rank 0, whose outputs lie where its inputs are, has done all but to wait."""
    read, complete = Segment.read, Segment.complete
    ranks: dict[threading.Thread, int] = {}
    finished = threading.Event()

    def read_late(self: Segment, *arguments: Any, **options: Any) -> None:
        if ranks[threading.current_thread()] == 1:
            assert finished.wait(10)
        read(self, *arguments, **options)

    def complete_first(self: Segment, exposure: Exposure) -> None:
        if ranks[threading.current_thread()] == 0:
            finished.set()
        complete(self, exposure)
        finished.clear()

    def call(comm: LocalCommunicator) -> None:
        ranks[threading.current_thread()] = rank = comm.rank
        parts = [np.full(20_000, 10 * rank + part, FLOAT32) for part in range(2)]
        comm.all_gather(parts, parts[1 - rank], NOW)
        assert [part[0] for part in parts] == [1, 10]
        parts = [np.full(20_000, 10 * rank + part, FLOAT32) for part in range(2)]
        comm.reduce_scatter(parts[1 - rank], parts, ReduceOp.SUM, NOW)
        assert parts[1 - rank][-1] == 10 + 2 * rank
        parts = [np.full(20_000, 10 * rank + part, FLOAT32) for part in range(2)]
        comm.scatter(parts[1], parts if rank == 0 else [], 0, NOW)
        assert parts[1][-1] == rank

    monkeypatch.setattr(Segment, "read", read_late)
    monkeypatch.setattr(Segment, "complete", complete_first)
    pair.run(call)


# Failures


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "readable"])
def test_what_was_read_from_a_rank_that_left_the_call_does_not_count(
    pair: World, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 gives up after it has posted its last step, while rank 0 still reads: its array may be anything then."""
    gone = threading.Event()
    slowly, wait = Segment.read, Segment._wait

    def read_late(self: Segment, *arguments: Any, **options: Any) -> None:
        assert gone.wait(10)
        slowly(self, *arguments, **options)

    def interrupted(self: Segment, line: int, other: int, steps: int) -> None:
        if threading.current_thread() in leaver and steps >= last[0]:
            raise KeyboardInterrupt
        wait(self, line, other, steps)

    leaver: list[threading.Thread] = []
    last = [1 << 62]

    def call(members: LocalCommunicator) -> None:
        array = members.empty(FLOAT32, 50_000, NOW) if registered else np.empty(50_000, FLOAT32)
        array[:] = members.rank
        members.barrier(NOW)
        if members.rank == 1:
            leaver.append(threading.current_thread())
            segment = members.queue.backend.segment  # type: ignore[attr-defined]
            last[0] = segment._steps + 2  # the step that ends the call
            with pytest.raises(KeyboardInterrupt):
                members.broadcast(array, 1, NOW)
            array[:] = 7
            gone.set()
        else:
            with pytest.raises(DistError, match="KeyboardInterrupt"):
                members.broadcast(array, 1, NOW)

    monkeypatch.setattr(Segment, "read", read_late)
    monkeypatch.setattr(Segment, "_wait", interrupted)
    pair.run(call)


@pytest.mark.usefixtures("short_rows")
def test_what_was_read_from_another_process_with_the_pid_of_a_rank_does_not_count(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_DETECTION_SECONDS", 0.1)
    monkeypatch.setattr(process_vm, "can_read", lambda *process: False)

    def call(members: LocalCommunicator) -> None:
        with pytest.raises(DistError, match="left the call, or its memory could no longer be read"):
            members.all_gather([np.zeros(50_000, FLOAT32) for _ in range(2)], np.ones(50_000, FLOAT32), NOW)

    pair.run(call)
