"""The wait-for graph of four ranks, whose frames are handed over by the test."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace

import pytest

from rankmesh_agent.progress import wait_graph
from rankmesh_agent.progress.status import Status
from rankmesh_agent.progress.wait_graph import WaitGraph
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import HEADER_BYTES, Header

GROUP, SEQ = 7, 3


def engine_of(rank: int, waits: list[Status], send, silent: float = 0.0):
    """Return as much of a progress engine as a wait-for graph uses."""
    return SimpleNamespace(
        rank=rank,
        epoch=1,
        waits=lambda: waits.copy(),
        send=send,
        is_connected=lambda peer: True,
        world_size=1 << 20,
        silent_seconds=lambda peer: silent,
    )


class Ranks:
    """Four ranks in one call: each waits for those of ``waits_for``; a rank that is not there makes no call."""

    def __init__(self, waits_for: dict[int, list[int]]) -> None:
        self.waits_for = waits_for
        self.queue: deque[tuple[int, int, Header, bytes]] = deque()
        self.graphs = {rank: self.graph(rank) for rank in range(4)}

    def graph(self, rank: int, silent: float = 0.0, limit: str = "") -> WaitGraph:
        """Return the graph of a rank, whose peers' hosts have been silent for some seconds."""
        ranks = tuple((peer, peer) for peer in self.waits_for.get(rank, []))
        waits = [Status(GROUP, SEQ, 5, "a call", ranks, (0, 1, 2, 3))] if rank in self.waits_for else []

        def send(peer: int, buffers: list) -> None:
            whole = b"".join(map(bytes, buffers))
            self.queue.append((rank, peer, frames.decode(whole, 0, frames.SMALL), whole[HEADER_BYTES:]))

        return WaitGraph(engine_of(rank, waits, send, silent), lambda since: limit)

    def deliver(self) -> None:
        while self.queue:
            rank, peer, header, payload = self.queue.popleft()
            if peer in self.waits_for:  # another one does not move bytes
                self.graphs[peer].on_frame(rank, header, payload)

    def blamed(self, rank: int) -> list[int]:
        return self.graphs[rank].stragglers(self.waits_for[rank], GROUP, SEQ).ranks


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(wait_graph, "time", clock)
    return clock


CHAIN = {0: [2], 1: [0], 3: [2]}


@pytest.mark.parametrize("first", CHAIN)
def test_the_end_of_the_chain_is_blamed(clock, first):
    ranks = Ranks(CHAIN)
    ranks.graphs[first].inquire(CHAIN[first])
    ranks.deliver()
    clock.now += wait_graph.ASK_SECONDS
    assert ranks.blamed(first) == [2]


def test_answers_that_come_before_the_question(clock):
    """Rank 1 asks last: all that rank 0 and rank 3 have to report, it knows by then."""
    ranks = Ranks(CHAIN)
    for rank in (0, 3):
        ranks.graphs[rank].inquire(CHAIN[rank])
    ranks.deliver()
    ranks.graphs[1].inquire(CHAIN[1])
    assert {peer for rank, peer, _, _ in ranks.queue if rank == 1} >= {0, 2}
    ranks.queue.clear()  # no other answer comes
    clock.now += wait_graph.ASK_SECONDS
    assert ranks.blamed(1) == [2]


def test_a_rank_that_has_had_no_time_to_answer(clock):
    ranks = Ranks(CHAIN)
    ranks.graphs[1].inquire(CHAIN[1])
    clock.now += wait_graph.ASK_SECONDS - 0.1
    ranks.deliver()
    clock.now += 0.1
    assert ranks.blamed(1) == [2]


def test_a_rank_that_is_elsewhere(clock):
    ranks = Ranks(CHAIN)
    ranks.waits_for[2] = []
    ranks.graphs[2]._engine.waits = list
    ranks.graphs[1].inquire(CHAIN[1])
    ranks.deliver()
    clock.now += wait_graph.ASK_SECONDS
    assert ranks.blamed(1) == [2]


def test_a_rank_that_waits_elsewhere_for_a_stopped_one_is_not_blamed(clock):
    ranks = Ranks({0: [1], 1: []})
    elsewhere = Status(GROUP + 1, SEQ, 5, "another call", ((2, 2),))
    ranks.graphs[1]._engine.waits = lambda: [elsewhere]
    ranks.graphs[0].inquire([1])
    ranks.deliver()
    clock.now += wait_graph.ASK_SECONDS
    found = ranks.graphs[0].stragglers([1], GROUP, SEQ)
    assert (found.ranks, found.present, found.elsewhere) == ([2], set(), {1: elsewhere})


def test_an_answer_that_cannot_be_read(clock):
    ranks = Ranks({1: [0]})
    header = frames.decode(frames.encode(frames.Opcode.ENTER, group=wait_graph.GROUP, epoch=1, part=1), 0, frames.SMALL)
    ranks.graphs[1].on_frame(0, header, json.dumps({"no": "list"}).encode())
    assert ranks.blamed(1) == [0]


LIMIT = "a client of the store waits: no free descriptor"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_without_descriptors_is_the_cause_wherever_it_waits(clock, stopped):
    """Rank 2 is blocked in a call that needs rank 3, which reports its limit to all."""
    ranks = Ranks({0: [2], 3: [2]})
    graph = ranks.graphs[3] = ranks.graph(3, limit=LIMIT)
    graph.report_exhaustion(range(3))
    ranks.deliver()
    if not stopped:
        ranks.graphs[0].inquire([2])
    clock.now += wait_graph.ASK_SECONDS
    found = ranks.graphs[0].stragglers([2], GROUP, SEQ, clock.now - 5)
    assert (found.ranks, found.exhausted) == ([2], {3: LIMIT})
    assert found.present <= {3}
    assert graph.stragglers([2], GROUP, SEQ).exhausted == {3: LIMIT}


def test_a_limit_is_no_cause_of_a_call_that_begins_later_or_of_a_network_that_is_down(clock):
    ranks = Ranks({0: [2], 3: [2]})
    graph = ranks.graphs[3] = ranks.graph(3, limit=LIMIT)
    silent = ranks.graphs[0] = ranks.graph(0, silent=5.0)
    graph.report_exhaustion(range(3))
    ranks.deliver()
    clock.now += 0.1
    assert silent.exhausted(clock.now) == {}
    assert silent.exhausted(0.0) == {3: LIMIT}
    silent.inquire([2])
    clock.now += wait_graph.ASK_SECONDS
    assert silent.stragglers([2], GROUP, SEQ).exhausted == {}
    clock.now += 5
    assert silent.exhausted(0.0) == {}


def test_a_rank_that_is_not_in_the_call_is_not_there_because_of_its_limit(clock):
    ranks = Ranks({0: [3], 3: []})
    ranks.graphs[3] = ranks.graph(3, limit=LIMIT)
    ranks.graphs[3]._engine.waits = list
    ranks.graphs[0].inquire([3])
    ranks.deliver()
    clock.now += wait_graph.ASK_SECONDS
    assert ranks.graphs[0].stragglers([3], GROUP, -1).present == set()


def test_a_report_of_many_waits_fits_into_a_frame():
    """Of fewer waits than there are, whole: a cut one could not be read at all."""
    waits = [Status(GROUP, SEQ, 5, "a call", tuple((10_000 + peer, 20_000 + peer) for peer in range(2000)))] * 150
    sent: list[bytes] = []
    busy = WaitGraph(engine_of(0, waits, lambda peer, buffers: sent.append(b"".join(buffers))))
    asker = WaitGraph(engine_of(1, [], lambda peer, buffers: None))
    busy.report_exhaustion([1])
    busy.on_frame(1, frames.decode(frames.encode(frames.Opcode.ENTER, part=0), 0, frames.SMALL), b"")
    asker.on_frame(0, frames.decode(sent[0], 0, frames.SMALL), sent[0][HEADER_BYTES:])
    assert asker.stragglers([0], GROUP, SEQ).present == {0}
