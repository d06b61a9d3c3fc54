"""Errors of calls of many ranks, each of which hears from a few others only. Ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.in_memory import MemoryWorld
from support.pauses import despite_pauses
from support.threads import NOW, World, world

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress import descriptions
from rankmesh_agent.progress.arrivals import Arrivals
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistBackendError
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]
SIZES = (12, 14, 20)
"""Ranks that call by way of one rank; in rounds, where all announce themselves to all; and to their neighbours only."""
ODD = (3, 7)
"""Ranks that do not make the others' call."""


@pytest.fixture(scope="module", params=SIZES)
def many(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks whose calls take rounds."""
    with world(request.param, "tcp") as made:
        yield made


def all_reduce(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(3), ReduceOp.SUM, options)


def broadcast(members: LocalCommunicator, options: Options = NOW) -> None:
    members.broadcast(np.ones(3), 5, options)


def gather(members: LocalCommunicator, options: Options = NOW) -> None:
    outputs = [np.empty(3) for _ in range(members.size)] if members.rank == 2 else []
    members.gather(outputs, np.ones(3), 2, options)


def long(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(30_000), ReduceOp.SUM, options)


def check_it_goes_on(members: LocalCommunicator) -> None:
    for _ in range(2):
        array = np.full(3, float(members.rank))
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == members.size * (members.size - 1) / 2).all()
        members.barrier(NOW)


CALLS = [LocalCommunicator.barrier, all_reduce, broadcast, gather, long]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_mismatch_names_the_ranks_and_their_calls(many: World, call: Callable[..., None]) -> None:
    def other(members: LocalCommunicator) -> None:
        members.all_gather([np.empty(2) for _ in range(members.size)], np.ones(2), NOW)

    def run(members: LocalCommunicator) -> CollectiveMismatchError:
        check_it_goes_on(members)
        with pytest.raises(CollectiveMismatchError) as caught:
            other(members) if members.rank in ODD else call(members, NOW)
        check_it_goes_on(members)
        return caught.value

    for rank, error in enumerate(many.run(run)):
        named = set(range(many.size)) - set(ODD) if rank in ODD else set(ODD)
        assert set(error.ranks) == named
        assert error.message.count("all_gather(float64[2])") >= 1
        if many.size > FEW_RANKS:
            assert "; ranks 3, 7: all_gather(float64[2])" in error.message
        assert call.__name__.replace("long", "all_reduce") in error.message


def test_no_rank_is_more_than_a_call_ahead(many: World) -> None:
    """A root that sends again and again is held up by slow ranks: no rank keeps frames of more than the next call."""

    def run(members: LocalCommunicator) -> int:
        most = 0
        for number in range(40):
            if members.rank == 9 and number % 10 == 0:
                with pytest.raises(CollectiveTimeoutError):
                    members.receive(np.ones(1), 0, 0, Options(0.1))
            array = np.full(3, float(number if members.rank == 5 else -1))
            members.broadcast(array, 5, NOW)
            assert (array == number).all()
            ahead = {seq for seq, _ in members.link._arrived.copy()}
            most = max(most, max(ahead, default=0) - members.state.seq)
        return most

    assert max(many.run(run)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "size"),
    [
        *((LocalCommunicator.barrier, 12), (LocalCommunicator.barrier, 14)),
        *((all_reduce, 14), (all_reduce, 20), (broadcast, 12), (broadcast, 20)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
@despite_pauses
def test_a_timeout_names_the_missing_ranks(size: int, call: Callable[..., None]) -> None:
    def run(members: LocalCommunicator) -> DistBackendError | None:
        check_it_goes_on(members)
        if members.rank in ODD:
            return None
        with pytest.raises(DistBackendError) as caught:
            call(members, Options(3.0))
        return caught.value

    with world(size, "tcp") as made:
        for error in made.run(run):
            if error is not None:
                assert set(error.ranks) == set(ODD), error.message


def test_announcements_reach_all_in_a_few_rounds() -> None:
    size, missing = 100, {3, 50, 51}
    ranks = {rank: Arrivals(rank, size) for rank in range(size) if rank not in missing}
    for _ in range(2 * (size - 1).bit_length()):
        sent = [(each.neighbours, each.announcement()) for each in ranks.values()]
        for receivers, mask in sent:
            for to in receivers:
                if to in ranks:
                    ranks[to].heard(mask)
    assert all(each.missing() == sorted(missing) for each in ranks.values())
    assert max(len(each.neighbours) for each in ranks.values()) <= 2 * (size - 1).bit_length()


def test_announcements_of_the_next_call_are_kept() -> None:
    arrivals = Arrivals(0, 3)
    arrivals.heard_ahead(5, 77, b"\x04")
    assert arrivals.begin(4) == set()
    assert arrivals.missing() == [1, 2]
    assert arrivals.begin(5) == {77}
    assert arrivals.missing() == [1]
    assert arrivals.begin(6) == set()


def test_reports_of_calls_reach_all_ranks_by_way_of_neighbours() -> None:
    ranks = MemoryWorld(40)
    late = {7, 21}
    for link in ranks.links:
        link.report_progress(2 if link.rank in late else 3, 5, "a call")
    for _ in range(12):
        for engine in ranks.engines:
            engine._deliver()
            engine.link.pass_on_progress()
    for link in ranks.links:
        assert set(link.lagging(3)) == late - {link.rank}
    assert ranks.links[0].progress[7].description == "a call"
    assert all(len(engine.sent) <= 10 for engine in ranks.engines)


def test_descriptions_of_many_ranks_travel_once_each() -> None:
    table = {b"a call": 0b1011}
    other = {b"a call": 0b0100, b"another": 1 << 19}
    descriptions.merge(table, descriptions.encode(other, 20), 20)
    found = descriptions.by_rank(table, 20)
    assert (found[2], found[19], found[5]) == (b"a call", b"another", b"")


def test_descriptions_that_do_not_fit_are_left_out() -> None:
    table = {bytes([letter]) * 5000: 1 << letter for letter in range(64)}
    encoded = descriptions.encode(table, 64)
    assert len(encoded) <= SMALL
    merged: descriptions.Table = {}
    descriptions.merge(merged, encoded, 64)
    assert 0 < len(merged) < 64
