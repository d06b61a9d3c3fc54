"""Every collective over everything that ranks as threads communicate over, against NumPy, bit for bit.

In half of the media each call takes any algorithm of the table that can, not the fastest one, and what is measured in
megabytes is measured in kilobytes, so that short arrays go through all of them and through all their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from support.sweep.cell import Cell, Place
from support.sweep.cover import SLOT_BYTES, cells_of, go_through
from support.sweep.media import OverCommunicator, Pool, over_http
from support.threads import NOW, World, in_threads, world

from rankmesh_agent.backends.base import Backend
from rankmesh_agent.backends.cpu import CpuBackend, HierarchicalCpuBackend
from rankmesh_agent.collectives import all_to_all, float16, link, reduce_scatter, reduction
from rankmesh_agent.collectives.select import TABLE, Algorithm, Medium, algorithms
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.ops import Call, OpType

Array = np.ndarray[Any, Any]
Taken = set[tuple[OpType, Medium, Algorithm]]


def _worlds(**media: tuple[int, ...]) -> list[Any]:
    """Return media with numbers of ranks, which share the cells of a sweep; many ranks take many seconds."""
    return [
        pytest.param(medium, sizes, world, id=f"{medium}-{size}", marks=[pytest.mark.slow] * (size > 4))
        for medium, sizes in media.items()
        for world, size in enumerate(sizes)
    ]


PLAIN = _worlds(tcp=(1, 2, 3, 5, 8), segment=(1, 2, 3, 5, 8))
"""Calls take the algorithms that they always take."""
ANY = _worlds(link=(2, 3, 4, 7), segment=(2, 3, 7), reads=(2, 3, 7), registered=(2, 3, 7))
LAYOUTS = ("aabb", "aaab", "abcc", "abab", "aaaabbbcc", "abcabca", "abbba")
"""Two and two, three and one, one and one and two, four and three and two, and ranks that are not in a row."""


@pytest.fixture
def taken() -> Iterator[Taken]:
    """Has calls take any algorithm that can; which these were."""
    found: Taken = set()
    turns: WeakKeyDictionary[Backend, Counter[tuple[OpType, Algorithm]]] = WeakKeyDictionary()

    def any_of(backend: Backend, call: Call, medium: Medium, slot_bytes: int | None = None, size: int = 1) -> Algorithm:
        able = [each for most, each in algorithms(call.kind, medium, slot_bytes, size) if call.nbytes <= most]
        turns_of = turns.setdefault(backend, Counter())  # all ranks make the same calls
        of_any = call.nbytes or call.kind is OpType.ALL_TO_ALL  # of nothing, chunks take no step
        chosen = min(able, key=lambda each: turns_of[call.kind, each]) if of_any else able[0]
        turns_of[call.kind, chosen] += 1
        found.add((call.kind, medium, chosen))
        return chosen

    usual, of_hosts = CpuBackend.algorithm, HierarchicalCpuBackend.algorithm

    def choose(self: CpuBackend, call: Call) -> Algorithm:
        if call.kind in (OpType.EMPTY, OpType.NEW_GROUP):
            return usual(self, call)
        segment = self.segment
        if segment is None:
            return any_of(self, call, "link")
        medium: Medium = "registered" if segment.regions else "reads" if segment.can_read else "segment"
        return any_of(self, call, medium, segment.slot_bytes)

    def choose_of_hosts(self: HierarchicalCpuBackend, call: Call) -> Algorithm:
        if call.kind in (OpType.EMPTY, OpType.NEW_GROUP):
            return of_hosts(self, call)
        assert self._topology is not None
        return any_of(self, call, "hosts", self._topology.local.slot_bytes, self._link.size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "algorithm", choose)
        patch.setattr(HierarchicalCpuBackend, "algorithm", choose_of_hosts)
        for module, name, value in (
            (link, "CHUNK_BYTES", 1 << 14),
            (reduce_scatter, "CACHE_BYTES", 1 << 11), (reduction, "_WIDE_PIECE", 1 << 9),
            (all_to_all, "_LONG", 1 << 12), (all_to_all, "_LONG_READS", 0),
            (float16, "_SMALL", 1 << 4), (float16, "_PIECE", 1 << 9),
        ):  # fmt: skip
            patch.setattr(module, name, value)
        yield found


def nothing_wrong(made: World, cells: tuple[Cell, ...], place: Callable[[Any], Place] = lambda comm: np.copy) -> None:
    """Fail unless all ranks find what they must, and all_reduce gives the same everywhere."""
    found = made.run(lambda comm: go_through(OverCommunicator(comm), cells, None, place(comm)))
    assert not [text for each in found for text in each["wrong"]]
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(("transport", "sizes", "number"), PLAIN)
def test_with_the_algorithms_of_the_table(transport: str, sizes: tuple[int, ...], number: int) -> None:
    with world(sizes[number], transport, slot_bytes=SLOT_BYTES) as made:
        nothing_wrong(made, cells_of("communicator", sizes)[number])


@pytest.mark.parametrize(("medium", "sizes", "number"), ANY)
def test_with_any_algorithm(medium: Medium, sizes: tuple[int, ...], number: int, taken: Taken) -> None:
    size = sizes[number]
    with world(size, "tcp" if medium == "link" else "segment", slot_bytes=SLOT_BYTES) as made:
        if medium == "segment" or (medium, size) == ("registered", 3):
            for comm in made.communicators:
                comm.queue.backend.segment.can_read = False  # type: ignore[attr-defined]
        pools: dict[int, Pool] = {}
        if medium == "registered":
            made.run(lambda comm: pools.__setitem__(comm.rank, Pool(comm, half=comm.rank == size - 1)))
        cells = cells_of("any algorithm", sizes)[number]
        nothing_wrong(made, cells, lambda comm: pools[comm.rank].put if pools else np.copy)
        if medium != "link" or size > 3:  # else the cells have fewer arrays than there are algorithms
            assert taken >= all_of(medium)


@pytest.mark.parametrize(
    "worlds", [range(4), pytest.param(range(4, 7), marks=pytest.mark.slow)], ids=["of 4", "larger"]
)
def test_over_hosts(worlds: range, taken: Taken) -> None:
    cells = cells_of("any algorithm", tuple(map(len, LAYOUTS)))
    for number in worlds:
        hosts = LAYOUTS[number]
        with world(len(hosts), "tcp", slot_bytes=SLOT_BYTES, hosts=hosts) as made:
            assert {comm.medium for comm in made.communicators} == {"shm+tcp"}
            nothing_wrong(made, cells[number])
    assert taken >= all_of("hosts")


def all_of(medium: Medium) -> Taken:
    """Return the algorithms of the table for a medium."""
    return {
        (kind, medium, row.algorithm)
        for (kind, of), rows in TABLE.items()
        if of == medium and kind is not OpType.BARRIER
        for row in rows
    }


@pytest.mark.slow
def test_over_http() -> None:
    cells = cells_of("http", (3,))[0][::3]  # every value; what pairs of them do, the media above show
    with world(3, "tcp", slot_bytes=SLOT_BYTES) as made, over_http(made) as apis:
        found = in_threads(3, lambda rank: go_through(apis[rank], cells))
        assert not [text for each in found for text in each["wrong"]]


# What the sweep cannot show: whether barriers wait


@pytest.fixture(scope="module", params=("tcp", "segment"))
def four(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(4, request.param, slot_bytes=SLOT_BYTES) as made:
        yield made


def test_nobody_passes_a_barrier_before_all_have_come(four: World) -> None:
    come: list[int] = []

    def call(members: LocalCommunicator) -> int:
        passed = 0
        for turn in range(20):
            come.append(members.rank)
            members.barrier(NOW)
            passed += len(come) >= members.size * (turn + 1)
        return passed

    assert four.run(call) == [20] * four.size
