"""Errors of a group of many ranks: whole at the other ranks, too."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.progress.wait_graph import WaitGraph
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import CollectiveTimeoutError, GroupAbortedError
from rankmesh_agent.wire.schemas import Member


class Engine(SimpleNamespace):
    """As much of a progress engine as a group's state uses, with the frames that it has been given."""

    def __init__(self, rank: int) -> None:
        sent: list[tuple[int, list[bytes]]] = []
        super().__init__(
            rank=rank,
            epoch=1,
            on_demand=False,
            lock=threading.RLock(),
            lost_peers={},
            unaddressed={},
            sent=sent,
            send=lambda to, frame: sent.append((to, frame)),
            unregister_sink=lambda group: None,
            flush=lambda seconds: None,
        )
        self.wait_graph = WaitGraph(self)  # type: ignore[arg-type]


def state_of(rank: int, size: int) -> tuple[LocalGroupState, Any]:
    ranks = tuple(range(size))
    members = {
        number: Member(number, f"{number:032x}", f"node{number // 8:04}.example", "h", 100_000 + number, [], "", 0)
        for number in ranks
    }
    engine = Engine(rank)
    return LocalGroupState(engine, 7, "world", ranks, members, FlightRecorder(10)), engine  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1500, 10_000])
@pytest.mark.parametrize("step", [1, 2], ids=["all others", "every other one"])
def test_an_abort_names_all_missing_ranks(size: int, step: int) -> None:
    state, engine = state_of(0, size)
    missing = list(range(1, size, step))
    error = state.timeout_error(missing, "all_reduce #5", Deadline(30), 5)
    assert error.ranks == tuple(missing)
    assert f"rank {missing[3]} (node0000.example, pid {100_000 + missing[3]}) and ranks {missing[4]}" in error.message
    assert f"rank {missing[4]} (" not in error.message
    state.abort(error)
    payload = engine.sent[0][1][1]
    assert len(payload) <= frames.SMALL
    other, _ = state_of(1, size)
    other.on_abort(payload)
    assert other.failure is not None
    assert other.failure.ranks == tuple(missing)
    assert "gave up: all_reduce #5 in group 'world' waited 30.0 s for rank 1 (node0000.example" in other.failure.message


@pytest.mark.parametrize("known", [False, True], ids=["the sender does not know", "the sender knows"])
def test_a_rank_without_descriptors_says_so_when_another_one_names_it(known: bool) -> None:
    limit = "a connection could not be made: no free descriptor; raise it with ulimit -n"
    sender, engine = state_of(0, 3)
    if known:
        engine.wait_graph.exhausted = lambda since: {2: limit}
    sender.abort(sender.timeout_error([2], "all_reduce #5", Deadline(5), 5))
    for rank in (1, 2):
        state, own = state_of(rank, 3)
        own.waits = WaitGraph(own, lambda since: limit)
        state.on_abort(engine.sent[0][1][1])
        assert state.failure is not None
        assert state.failure.ranks == (2,)
        assert state.failure.message.count(f"rank 2 (node0000.example, pid 100002) reports: {limit}") == max(
            known, rank == 2
        )
        assert isinstance(state.failure, DescriptorLimitError if rank == 2 else GroupAbortedError)


def test_few_missing_ranks_are_all_described() -> None:
    state, _ = state_of(0, 40)
    error = state.timeout_error(range(1, 17), "all_reduce #5", Deadline(30), 5)
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 16 (node0002.example, pid 100016); arrived: 0, 17-39" in error.message
