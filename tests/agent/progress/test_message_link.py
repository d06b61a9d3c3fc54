"""Arrivals by way of rank 0 and in rounds: ranks that are missing, call something else or leave. Ranks as threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.pauses import despite_pauses
from support.threads import NOW, World, world

from rankmesh_agent.backends import cpu
from rankmesh_agent.collectives import all_reduce
from rankmesh_agent.collectives.select import TABLE, Row, algorithm
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress import message_link
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistBackendError
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import OpType, ReduceOp

SIZE = 5
every_rank = pytest.mark.parametrize("odd", [0, SIZE - 1])


WAYS = {"star": all_reduce.star_link, "rounds": all_reduce.doubling_link, "tree": all_reduce.doubling_link}


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whatever the limits say that were measured, these calls go by way of rank 0, or in rounds."""
    star = request.param == "star"
    rows = Row(WAYS[request.param], {2: SMALL}), Row(all_reduce.halving_link)
    monkeypatch.setitem(TABLE, (OpType.ALL_REDUCE, "link"), rows)
    for module in (message_link, cpu):
        monkeypatch.setattr(module, "DIRECT_RANKS", 0)
    monkeypatch.setattr(message_link, "_STAR_RANKS", SIZE if star else 0)
    return request.param


@contextlib.contextmanager
def ranks_of(way: str) -> Iterator[World]:
    with world(SIZE, "tcp") as made:
        for members in made.communicators:
            members.link.shares_cores = way == "tree"
        yield made


@pytest.fixture
def ranks(way: str) -> Iterator[World]:
    with ranks_of(way) as made:
        yield made


def small(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(10), ReduceOp.SUM, options)


def small_of_another_dtype(members: LocalCommunicator) -> None:
    members.all_reduce(np.ones(10, np.float32), ReduceOp.SUM, NOW)


def large(members: LocalCommunicator) -> None:
    members.all_reduce(np.ones(100_000), ReduceOp.SUM, NOW)


def gather(members: LocalCommunicator) -> None:
    members.all_gather([np.zeros(3) for _ in range(members.size)], np.ones(3), NOW)


def check_it_goes_on(members: LocalCommunicator) -> None:
    for _ in range(3):
        array = np.full(3, float(members.rank))
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == SIZE * (SIZE - 1) / 2).all()
        members.barrier(NOW)


def test_the_calls_here_go_that_way(way: str) -> None:
    assert algorithm(OpType.ALL_REDUCE, "link", 80, SIZE) is WAYS[way]


@pytest.mark.slow
@every_rank
@despite_pauses
def test_the_one_who_stays_away_is_named_and_nobody_else(way: str, odd: int) -> None:
    def run(members: LocalCommunicator) -> DistBackendError | None:
        check_it_goes_on(members)
        if members.rank == odd:
            return None
        with pytest.raises(DistBackendError) as caught:
            small(members, Options(2.0))
        return caught.value

    with ranks_of(way) as ranks:
        for error in ranks.run(run):
            if error is not None:
                assert error.ranks == (odd,)
                assert f"waited 2.0 s for rank {odd} (here" in error.message
        assert sum(error is None for error in ranks.run(lambda members: members.failure)) == 1


@every_rank
@pytest.mark.parametrize("stray", [small_of_another_dtype, large, gather])
def test_a_rank_that_calls_something_else_is_told_to_all(ranks: World, odd: int, stray: Callable[..., None]) -> None:
    def run(members: LocalCommunicator) -> None:
        for others_stray in (False, True):
            with pytest.raises(CollectiveMismatchError) as caught:
                (stray if (members.rank == odd) != others_stray else small)(members)
            assert caught.value.message.count("all_reduce") >= (1 if stray is gather else SIZE)
            check_it_goes_on(members)

    ranks.run(run)


@every_rank
def test_a_late_one_is_waited_for(ranks: World, odd: int) -> None:
    """Meanwhile the others tell each other that they are there; what is left of that does no harm to later calls."""

    def run(members: LocalCommunicator) -> None:
        if members.rank == odd:
            with pytest.raises(CollectiveTimeoutError):
                members.receive(np.ones(1), (odd + 1) % SIZE, 0, Options(0.4))
        check_it_goes_on(members)
        assert all(seq >= SIZE for seq, _ in members.link._arrived)
        for other in set(range(SIZE)) - {odd, members.rank}:
            assert members.link.calls.of_others()[other].text in ("all_reduce(float64[3], SUM)", "barrier()")

    ranks.run(run)


@every_rank
def test_who_leaves_after_its_last_call_disturbs_nobody(ranks: World, odd: int) -> None:
    def run(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        members.barrier(NOW)
        if members.rank == odd:
            members.close()
            members.engine.close(timeout=0.5)

    ranks.run(run)


@every_rank
def test_who_leaves_without_coming_is_named(ranks: World, odd: int) -> None:
    all_made_the_call = threading.Barrier(SIZE)

    def run(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        all_made_the_call.wait(60)
        if members.rank == odd:
            members.close()
            members.engine.close("bored", timeout=0.5)
            return
        with pytest.raises(DistBackendError, match=rf"rank {odd} .*left \(bored\)") as caught:
            members.barrier(NOW)
        assert caught.value.ranks == (odd,)

    ranks.run(run)
