"""Growth of a job's world: who is admitted, when it is complete, and what is left after one that is given up."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import replace

import pytest

from rankmesh_agent.wire.errors import JobEndedError, RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import UNASSIGNED
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import InvalidRequestError


@pytest.fixture
def world(registry, ask):
    """Registry in which ranks 0 and 1 of a world of 2 are live."""
    return [registry.join(ask.join(rank)) for rank in range(2)][-1].result(timeout=0)


def numbers(registry: Registry) -> list[tuple[int, int, str]]:
    return [(info.epoch, info.member.rank, info.state) for info in registry.ranks()]


@pytest.mark.parametrize("waiting_first", [True, False])
def test_the_ranks_keep_their_order_and_waiting_processes_come_behind(registry, ask, world, waiting_first):
    requests = [ask.growth(1, 4), ask.growth(0, 4)]
    waiting = [ask.waiting(7), ask.waiting(8)]
    order = waiting + requests if waiting_first else requests + waiting
    futures = [registry.join(request) for request in order]
    (reply,) = {id(future.result(timeout=0)): future.result() for future in futures}.values()
    assert (reply.complete, reply.epoch, reply.world_size, reply.missing) == (True, 2, 4, [])
    assert [(each.rank, each.instance) for each in reply.members] == [
        (0, "r0-2"),
        (1, "r1-2"),
        (2, "r7-1"),
        (3, "r8-1"),
    ]
    assert registry.waiting() == []
    assert all(registry.join(request).result(timeout=0).epoch == 2 for request in order)


def test_the_old_epoch_is_forgotten_once_its_ranks_have_left(registry, ask, world):
    for request in (ask.waiting(7), ask.growth(0, 3), ask.growth(1, 3)):
        registry.join(request)
    assert numbers(registry) == [(1, 0, "alive"), (1, 1, "alive"), (2, 0, "alive"), (2, 1, "alive"), (2, 2, "alive")]
    registry.leave(ask.leave(0))
    assert {each[0] for each in numbers(registry)} == {1, 2}
    registry.leave(ask.leave(1))
    assert {each[0] for each in numbers(registry)} == {2}


def test_waiting_processes_beyond_the_size_wait_for_the_next_growth(registry, ask, world):
    waiting = [registry.join(ask.waiting(number)) for number in (7, 8, 9)]
    assert [(each.job, each.member.rank, each.member.instance) for each in registry.waiting()] == [
        ("job", UNASSIGNED, f"r{number}-1") for number in (7, 8, 9)
    ]
    for rank in range(2):
        registry.join(ask.growth(rank, 3))
    assert [future.done() for future in waiting] == [True, False, False]
    assert [each.member.instance for each in registry.waiting()] == ["r8-1", "r9-1"]
    for rank in range(3):
        registry.join(ask.growth(rank, 5, size=3, epoch=2, life=3))
    assert [future.result(timeout=0).epoch for future in waiting] == [2, 3, 3]


def test_waiting_processes_count_only_beside_all_ranks_of_the_world(registry, ask, world):
    waiting = [registry.join(ask.waiting(number)) for number in (7, 8)]
    rank = registry.join(ask.growth(0, 3))
    assert not any(future.done() for future in [*waiting, rank])
    status = registry.join_status(ask.growth(0, 3))
    assert (status.complete, status.missing, [each.instance for each in status.members]) == (
        False,
        [1, 2],
        ["r0-2", "r7-1"],
    )


def test_a_growth_that_is_given_up_leaves_the_world_and_the_wait_list(registry, ask, world):
    waiting = registry.join(ask.waiting(7))
    ranks = [registry.join(ask.growth(0, 4))]
    registry.leave(ask.leave(0, life=2))
    with pytest.raises(CancelledError):
        ranks[0].result(timeout=0)
    assert not waiting.done()
    assert numbers(registry) == [(1, 0, "alive"), (1, 1, "alive")]
    for rank in range(2):
        registry.join(ask.growth(rank, 3, life=3))
    assert waiting.result(timeout=0).epoch == 2


def test_a_world_that_breaks_after_its_growth_leaves_the_one_before(registry, ask, world):
    for request in (ask.waiting(7), ask.growth(0, 3), ask.growth(1, 3)):
        registry.join(request)
    registry.leave(ask.leave(0, life=2, epoch=2, reason="no connection"))
    registry.leave(ask.leave(1, life=2, epoch=2, reason="no connection"))
    registry.leave(ask.leave_unassigned(7, reason="no connection"))
    assert numbers(registry) == [(1, 0, "alive"), (1, 1, "alive")]
    assert list(registry.members("job")) == [0, 1]
    registry.join(ask.waiting(8))
    registry.join(ask.growth(0, 3, life=3))
    assert registry.join(ask.growth(1, 3, life=3)).result(timeout=0).epoch == 3


def test_a_waiting_process_that_dies_gives_its_place_to_the_next(registry, ask, world, clock):
    dead = registry.join(ask.waiting(7))
    registry.join(ask.growth(0, 3))
    living = registry.join(ask.waiting(8))
    dead.cancel()
    clock.advance(JOIN_SILENCE_SECONDS + 1)
    for rank in range(2):
        registry.heartbeat(ask.heartbeat(rank))
    registry.join(ask.growth(0, 3))
    assert not living.done()
    registry.join(ask.growth(1, 3))
    assert [each.instance for each in living.result(timeout=0).members] == ["r0-2", "r1-2", "r8-1"]


def test_a_waiting_process_whose_connection_breaks_is_forgotten(registry, ask, world):
    registry.join(ask.waiting(7)).cancel()
    registry.withdraw_join(ask.waiting(7))
    assert registry.waiting() == []


def test_a_gateway_that_was_started_anew_numbers_the_epoch_after_that_of_the_ranks(registry, ask):
    for request in (ask.waiting(7), ask.growth(0, 3, epoch=5), ask.growth(1, 3, epoch=5)):
        future = registry.join(request)
    assert future.result(timeout=0).epoch == 6


def test_waiting_processes_of_a_job_that_has_ended_are_told_so(registry, ask, world):
    waiting = registry.join(ask.waiting(7))
    registry.leave(ask.leave(0))
    assert not waiting.done()
    registry.leave(ask.leave(1, reason="SIGKILL"))
    assert waiting.cancelled()
    with pytest.raises(JobEndedError, match="all ranks of job 'job' have left"):
        registry.join(ask.waiting(7))
    registry.join(ask.join(0, life=2))
    registry.join(ask.join(1, life=2))
    assert not registry.join(ask.waiting(7)).done()


def test_ranks_that_disagree_are_told_so(registry, ask, world):
    registry.join(ask.growth(0, 3))
    with pytest.raises(WorldSizeMismatchError, match=r"rank 1 .* says that job 'job' has 4 ranks, but rank 0"):
        registry.join(ask.growth(1, 4))
    with pytest.raises(RankTakenError, match="already holds rank 0"):
        registry.join(ask.growth(0, 3, life=9))


def test_the_halves_of_a_split_world_do_not_mix(registry, ask, world):
    registry.join(ask.growth(0, 3))
    other = ask.growth(1, 3)
    other.growth.group = "another"
    with pytest.raises(WorldSizeMismatchError, match="has the world split"):
        registry.join(other)


def test_a_replacement_that_dies_before_it_joins_is_not_the_rank_of_its_number(registry, ask, world):
    for request in (ask.waiting(7), ask.growth(0, 3), ask.growth(1, 3)):
        registry.join(request)
    registry.leave(ask.leave(0))
    registry.leave(ask.leave(1))
    registry.process_exited("job", 1, 4711, "host1", "signal SIGKILL (9)")
    assert [state for _, _, state in numbers(registry)] == ["alive"] * 3
    registry.process_exited("job", 5, 201, "host1", "signal SIGKILL (9)")
    assert [state for _, _, state in numbers(registry)] == ["alive", "failed", "alive"]


def test_a_larger_world_that_falls_silent_before_it_begins_leaves_the_one_before(registry, ask, world, clock):
    for request in (ask.waiting(7), ask.growth(0, 3), ask.growth(1, 3)):
        registry.join(request)
    for rank in range(2):
        registry.leave(ask.leave(rank, life=2, epoch=2, reason="no connection"))
    for _ in range(3):
        clock.advance(4)
        for rank in range(2):
            registry.heartbeat(ask.heartbeat(rank))
    assert list(registry.members("job")) == [0, 1]
    assert {epoch for epoch, *_ in numbers(registry)} == {1}


def test_a_restart_ends_the_growth(registry, ask, world):
    waiting = [registry.join(ask.waiting(7)), registry.join(ask.growth(0, 3))]
    registry.restart("job", 2)
    assert all(future.cancelled() for future in waiting)
    assert registry.waiting() == []
    with pytest.raises(RankTakenError, match="restart 2"):
        registry.join(replace(ask.waiting(7), attempt=1))
    assert not registry.join(ask.waiting(7)).done(), "a process that no launcher has started joins any attempt"


@pytest.mark.parametrize(("rank", "size", "base"), [(0, 1, 2), (2, 3, 2), (-1, 3, 2)])
def test_requests_that_fit_no_growth_are_invalid(registry, ask, rank, size, base):
    request = ask.growth(max(rank, 0), size, size=base)
    request.member.rank = rank
    with pytest.raises(InvalidRequestError):
        registry.join(request)


def test_a_rank_of_a_world_that_grows_does_not_await_its_growth(registry, ask):
    with pytest.raises(InvalidRequestError, match="not both"):
        registry.join(replace(ask.growth(0, 3), awaits_growth=True))


def test_who_takes_the_place_of_a_lost_rank_has_its_rank_until_the_first_world_is_complete(registry, ask):
    registry.join(ask.join(0))
    request = replace(ask.join(1, life=2), awaits_growth=True)
    assert registry.join(request).result(timeout=0).epoch == 1
    assert registry.join(request).result(timeout=0).epoch == 1
    assert [each.instance for each in registry.join_status(request).members] == ["r0-1", "r1-2"]


def test_who_takes_the_place_of_a_lost_rank_later_waits_for_the_growth(registry, ask, world):
    request = replace(ask.join(1, life=3), awaits_growth=True)
    waiting = registry.join(request)
    assert not waiting.done()
    assert registry.waiting()[0].member.rank == UNASSIGNED
    assert [each.instance for each in registry.join_status(request).members] == ["r1-3"]
    for rank in range(2):
        registry.join(ask.growth(rank, 3))
    assert waiting.result(timeout=0).members[2].instance == "r1-3"
    assert registry.join(request).result(timeout=0).epoch == 2
    again = replace(ask.join(1, life=4), awaits_growth=True)
    assert not registry.join(again).done()
    registry.leave(ask.leave(1, life=4))
    assert registry.waiting() == []
