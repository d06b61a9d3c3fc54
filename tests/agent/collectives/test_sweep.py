"""Every collective over everything that ranks as threads communicate over, against NumPy, bit for bit.

In half of the media each call takes any algorithm of the table that can, not the fastest one, and what is measured in
megabytes is measured in kilobytes, so that short arrays go through all of them and through all their steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.http_ranks import applications, clients
from support.sweep.cell import Place
from support.sweep.cover import SLOT_BYTES, cells_of, go_through
from support.sweep.media import OverCommunicator, OverHttp, Pool
from support.threads import LATER, NOW, World, in_threads, world

from rankmesh_agent.backends.cpu import CpuBackend, HierarchicalCpuBackend
from rankmesh_agent.collectives import all_reduce, all_to_all, float16, reduce_scatter, reduction
from rankmesh_agent.collectives.select import Algorithm, Medium, algorithms, candidates
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.errors import CollectiveMismatchError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Array = np.ndarray[Any, Any]
Taken = set[tuple[OpType, Medium, Algorithm]]


def _worlds(*media: str, sizes: tuple[int, ...]) -> list[Any]:
    """Return media with numbers of ranks; many ranks take many seconds."""
    return [pytest.param(medium, size, marks=[pytest.mark.slow] * (size > 4)) for medium in media for size in sizes]


PLAIN = [*_worlds("inproc", "segment", sizes=(1, 2, 3, 5, 8)), *_worlds("tcp", sizes=(3,))]
"""Calls take the algorithms that they always take."""
ANY = [*_worlds("link", sizes=(2, 3, 4, 8)), *_worlds("segment", "reads", "registered", sizes=(2, 3, 7))]
LAYOUTS = ("aabb", "aaab", "abcc", "aaaabbbcc", "abab", "abcabca", "abbba")
"""Two and two, three and one, one and one and two, four and three and two, and ranks that are not in a row."""


@pytest.fixture(scope="module")
def taken() -> Iterator[Taken]:
    """Has calls take any algorithm that can; which these were."""
    found: Taken = set()

    def any_of(call: Call, medium: Medium, slot_bytes: int | None) -> Algorithm:
        able = [each for most, each in candidates(call.kind, medium, slot_bytes) if call.nbytes <= most]
        chosen = able[call.fingerprint % len(able) if call.nbytes else 0]  # of nothing, chunks take no step
        found.add((call.kind, medium, chosen))
        return chosen

    usual, of_hosts = CpuBackend.algorithm, HierarchicalCpuBackend.algorithm

    def choose(self: CpuBackend, call: Call) -> Algorithm:
        if call.kind in (OpType.EMPTY, OpType.NEW_GROUP):
            return usual(self, call)
        segment = self.segment
        if segment is None:
            return any_of(call, "link", None)
        windows = segment.windows
        medium: Medium = "registered" if windows.regions else "reads" if windows.can_read else "segment"
        return any_of(call, medium, segment.slot_bytes)

    def choose_of_hosts(self: HierarchicalCpuBackend, call: Call) -> Algorithm:
        return of_hosts(self, call) if call.kind in (OpType.EMPTY, OpType.NEW_GROUP) else any_of(call, "hosts", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "algorithm", choose)
        patch.setattr(HierarchicalCpuBackend, "algorithm", choose_of_hosts)
        for module, name, value in (
            (all_reduce, "CHUNK_BYTES", 1 << 14), (reduce_scatter, "CHUNK_BYTES", 1 << 14),
            (reduce_scatter, "CACHE_BYTES", 1 << 11), (reduction, "_WIDE_PIECE", 1 << 9),
            (all_to_all, "_LONG", 1 << 12), (float16, "_SMALL", 1 << 4), (float16, "_PIECE", 1 << 9),
        ):  # fmt: skip
            patch.setattr(module, name, value)
        yield found


def nothing_wrong(made: World, space: str, place: Callable[[Any], Place] = lambda comm: np.copy) -> None:
    """Fail unless all ranks find what they must, and all_reduce gives the same everywhere."""
    found = made.run(lambda comm: go_through(OverCommunicator(comm), space, None, place(comm)))
    assert not [text for each in found for text in each["wrong"]]
    assert {each["cells"] for each in found} == {len(cells_of(space, made.size))}
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(("transport", "size"), PLAIN)
def test_with_the_algorithms_of_the_table(transport: str, size: int) -> None:
    with world(size, transport, slot_bytes=SLOT_BYTES) as made:
        nothing_wrong(made, "communicator")


@pytest.mark.parametrize(("medium", "size"), ANY)
def test_with_any_algorithm(medium: Medium, size: int, taken: Taken) -> None:
    with world(size, "inproc" if medium == "link" else "segment", slot_bytes=SLOT_BYTES) as made:
        if medium == "segment" or (medium, size) == ("registered", 3):
            for comm in made.communicators:
                comm.queue.backend.segment.windows.can_read = False  # type: ignore[attr-defined]
        pools: dict[int, Pool] = {}
        if medium == "registered":
            made.run(lambda comm: pools.__setitem__(comm.rank, Pool(comm, half=comm.rank == size - 1)))
        taken.clear()
        nothing_wrong(made, "any algorithm", lambda comm: pools[comm.rank].put if pools else np.copy)
        assert taken >= all_of(medium)


@pytest.mark.parametrize(
    "hosts", [pytest.param(hosts, marks=[pytest.mark.slow] * (len(hosts) > 4)) for hosts in LAYOUTS]
)
def test_over_hosts(hosts: str, taken: Taken) -> None:
    with world(len(hosts), "inproc", slot_bytes=SLOT_BYTES, hosts=hosts) as made:
        assert {comm.medium for comm in made.communicators} == {"shm+tcp"}
        taken.clear()
        nothing_wrong(made, "any algorithm")
        assert taken >= all_of("hosts")


def all_of(medium: Medium) -> Taken:
    """Return the algorithms of the table for a medium."""
    return {each for each in algorithms() if each[1] == medium and each[0] is not OpType.BARRIER}


@contextlib.contextmanager
def a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow
def test_over_http() -> None:
    with world(3, "inproc", slot_bytes=SLOT_BYTES) as made, a_loop() as loop:
        opened = clients(applications(made))
        asked = asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result(20)
        try:
            found = in_threads(3, lambda rank: go_through(OverHttp(rank, 3, asked[rank], loop), "http"))
        finally:
            asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result(20)
        assert not [text for each in found for text in each["wrong"]]


# What the sweep cannot show: the order of the calls, and whether they wait


@pytest.fixture(scope="module", params=("inproc", "tcp", "segment"))
def four(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(4, request.param, slot_bytes=SLOT_BYTES) as made:
        yield made


def test_reductions_are_bitwise_the_same_everywhere_also_where_the_order_matters(four: World) -> None:
    def call(members: LocalCommunicator) -> bytes:
        digests = b""
        for count in (3, 4097, 40_000):
            array = np.random.default_rng([members.rank, count]).normal(size=count).astype(np.float32) * 1e6
            members.all_reduce(array, ReduceOp.SUM, NOW)
            digests += array.tobytes()
        return digests

    assert len(set(four.run(call))) == 1


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


def test_asynchronous_calls_keep_their_order_and_synchronous_ones_queue_behind_them(four: World) -> None:
    def call(members: LocalCommunicator) -> np.ndarray[Any, Any]:
        array = np.full(2000, 1.0)
        works = [members.all_reduce(array, ReduceOp.SUM, LATER) for _ in range(5)]
        members.all_reduce(array, ReduceOp.MAX, NOW)
        assert all(work is not None and work.is_completed() and work.is_success() for work in works)
        return array

    for got in four.run(call):
        assert (got == float(four.size) ** 5).all()


NOTHING: dict[str, Callable[[LocalCommunicator, Array], Any]] = {
    "all_reduce": lambda comm, array: comm.all_reduce(array, ReduceOp.SUM, NOW),
    "reduce": lambda comm, array: comm.reduce(array, ReduceOp.SUM, 0, NOW),
    "broadcast": lambda comm, array: comm.broadcast(array, 0, NOW),
    "all_gather": lambda comm, array: comm.all_gather([array] * comm.size, array, NOW),
    "gather": lambda comm, array: comm.gather([array] * comm.size if comm.rank == 0 else [], array, 0, NOW),
    "scatter": lambda comm, array: comm.scatter(array, [array] * comm.size if comm.rank == 0 else [], 0, NOW),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array, [array] * comm.size, ReduceOp.SUM, NOW),
    "all_to_all": lambda comm, array: comm.all_to_all([array] * comm.size, [array] * comm.size, NOW),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_call_with_nothing_to_move_is_compared_and_waits_too(four: World, name: str) -> None:
    def call(comm: LocalCommunicator) -> None:
        with pytest.raises(CollectiveMismatchError, match=name):
            NOTHING[name](comm, np.empty(0)) if comm.rank % 2 else comm.barrier(NOW)

    four.run(call)
