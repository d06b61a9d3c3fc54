"""Growth of a job's world beyond the registry's model: errors' texts, and who takes the place of a lost rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankmesh_agent.wire.errors import JobEndedError, RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import UNASSIGNED
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.validation import InvalidRequestError


@pytest.fixture
def world(registry, ask):
    """Registry in which ranks 0 and 1 of a world of 2 are live."""
    return [registry.join(ask.join(rank)) for rank in range(2)][-1].result(timeout=0)


def test_a_waiting_process_that_dies_gives_its_place_to_the_next(registry, ask, world, clock):
    registry.join(ask.growth(0, 3))
    dead = [registry.join(ask.waiting(number)) for number in (7, 9)]
    living = registry.join(ask.waiting(8))
    for each in dead:
        each.cancel()
    clock.advance(JOIN_SILENCE_SECONDS + 1)
    for rank in range(2):
        registry.heartbeat(ask.heartbeat(rank))
    registry.join(ask.growth(1, 3))
    assert [each.instance for each in living.result(timeout=0).members] == ["r0-2", "r1-2", "r8-1"]


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


def test_a_process_of_an_attempt_before_awaits_no_growth(registry, ask, world):
    registry.restart("job", 2)
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
