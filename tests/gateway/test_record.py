"""How ranks are, by their heartbeats and goodbyes."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS
from rankmesh_gateway.checks import MAX_REASON, InvalidRequestError
from rankmesh_gateway.registry import Registry


@pytest.fixture
def pair(registry, ask) -> Registry:
    """A registry with a complete world of two."""
    for rank in range(2):
        registry.join(ask.join(rank))
    return registry


def state(registry, rank) -> str:
    return registry.ranks("job")[rank].state


@pytest.mark.parametrize(
    ("silence", "expected"),
    [(0, "alive"), (SUSPECT_SECONDS - 0.1, "alive"), (SUSPECT_SECONDS, "suspect"), (FAILED_SECONDS, "failed")],
)
def test_state_by_silence(pair, ask, clock, silence, expected):
    clock.advance(5)
    pair.heartbeat(ask.heartbeat(1))
    clock.advance(silence)
    assert state(pair, 1) == expected
    assert pair.ranks()[1].heartbeat_age == pytest.approx(silence)


def test_the_reply_lists_the_failed_ranks_of_the_same_epoch(pair, ask, clock):
    for rank in range(2):
        pair.join(ask.join(rank, job="other"))
    clock.advance(FAILED_SECONDS)
    assert pair.heartbeat(ask.heartbeat(0)).failed == [1]
    assert pair.ranks("job")[1].reason == "no heartbeat for 10.0 s"


def test_a_slow_rank_comes_back(pair, ask, clock):
    clock.advance(FAILED_SECONDS)
    pair.heartbeat(ask.heartbeat(1))
    assert state(pair, 1) == "alive"
    assert pair.heartbeat(ask.heartbeat(0)).failed == []


def test_leaving_in_order(pair, ask, clock):
    pair.leave(ask.leave(1))
    clock.advance(FAILED_SECONDS)
    assert state(pair, 1) == "left"
    assert pair.heartbeat(ask.heartbeat(0)).failed == []
    assert pair.counts() == (1, 1)


def test_leaving_with_a_reason_is_failing_at_once(pair, ask):
    pair.leave(ask.leave(1, reason="killed by signal 9"))
    assert pair.heartbeat(ask.heartbeat(0)).failed == [1]
    assert pair.ranks()[1].reason == "killed by signal 9"


def test_a_long_reason_is_cut(pair, ask):
    pair.leave(ask.leave(1, reason="x" * 2 * MAX_REASON))
    assert len(pair.ranks()[1].reason) == MAX_REASON


def test_a_heartbeat_overtaken_by_the_goodbye(pair, ask):
    pair.leave(ask.leave(1))
    pair.heartbeat(ask.heartbeat(1))
    assert state(pair, 1) == "left"


def test_the_first_goodbye_counts(pair, ask):
    pair.leave(ask.leave(1))
    pair.leave(ask.leave(1, reason="exit status 1"))
    assert state(pair, 1) == "left"


def test_goodbyes_of_strangers_are_ignored(pair, ask):
    pair.leave(ask.leave(1, life=2))
    pair.leave(ask.leave(7))
    pair.leave(ask.leave(0, job="unheard of"))
    assert [info.state for info in pair.ranks()] == ["alive", "alive"]


class TestRestartedGateway:
    def test_it_learns_from_heartbeats(self, registry, ask, clock):
        for rank in range(2):
            assert registry.heartbeat(ask.heartbeat(rank, epoch=3)).failed == []
        assert [(info.epoch, info.state) for info in registry.ranks()] == [(3, "alive"), (3, "alive")]
        clock.advance(FAILED_SECONDS)
        assert registry.heartbeat(ask.heartbeat(0, epoch=3)).failed == [1]

    def test_ranks_it_learned_are_taken(self, registry, ask):
        registry.heartbeat(ask.heartbeat(1, epoch=3))
        with pytest.raises(RankTakenError):
            registry.join(ask.join(1, life=2))

    def test_it_goes_on_counting_epochs(self, registry, ask):
        registry.heartbeat(ask.heartbeat(0, epoch=3))
        registry.leave(ask.leave(0, epoch=3))
        registry.join(ask.join(0, life=2))
        assert registry.join(ask.join(1, life=2)).result(timeout=0).epoch == 4

    def test_a_world_that_is_forming_when_it_learns(self, registry, ask):
        waiting = registry.join(ask.join(0, life=2))
        registry.heartbeat(ask.heartbeat(1, epoch=3))
        registry.leave(ask.leave(1, epoch=3))
        registry.join(ask.join(1, life=2))
        assert waiting.result(timeout=0).epoch == 4

    def test_a_heartbeat_of_a_forgotten_epoch(self, registry, ask):
        registry.heartbeat(ask.heartbeat(0, epoch=3))
        assert registry.heartbeat(ask.heartbeat(1, epoch=2)).failed == []
        assert [info.epoch for info in registry.ranks()] == [3]


def test_a_heartbeat_at_a_rank_that_another_holds(pair, ask, clock):
    with pytest.raises(RankTakenError, match="pid 101"):
        pair.heartbeat(ask.heartbeat(1, life=2))
    clock.advance(FAILED_SECONDS)
    pair.heartbeat(ask.heartbeat(1, life=2))
    assert pair.ranks()[1].member == ask.member(1, life=2)


def test_a_heartbeat_of_another_world_size(pair, ask):
    with pytest.raises(WorldSizeMismatchError):
        pair.heartbeat(ask.heartbeat(1, 5))


def test_a_heartbeat_that_makes_no_sense(registry, ask):
    with pytest.raises(InvalidRequestError, match="epochs count from 1"):
        registry.heartbeat(ask.heartbeat(0, epoch=0))
