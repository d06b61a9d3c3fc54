"""How ranks are, by their heartbeats and goodbyes."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, LostRank
from rankmesh_gateway.state.rank import IN_TRANSIT_SECONDS
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import MAX_REASON, InvalidRequestError


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


class TestLost:
    """A rank that others say is gone."""

    @staticmethod
    def tells(ask, *ranks, by=0, cause="connection reset"):
        beat = ask.heartbeat(by)
        beat.lost = [LostRank(rank, cause) for rank in ranks]
        return beat

    def test_it_has_failed_at_once_and_the_reason_says_who_saw_it(self, pair, ask):
        assert pair.heartbeat(self.tells(ask, 1)).failed == [1]
        info = pair.ranks()[1]
        assert info.state == "failed"
        assert info.reason == "rank 0 (host0, pid 100) lost its connection to it: connection reset"

    def test_a_heartbeat_of_it_that_was_under_way_changes_nothing(self, pair, ask, clock):
        pair.heartbeat(self.tells(ask, 1))
        clock.advance(IN_TRANSIT_SECONDS / 2)
        pair.heartbeat(ask.heartbeat(1))
        assert state(pair, 1) == "failed"

    def test_one_that_was_only_cut_off_is_alive_again_with_its_next_heartbeat(self, pair, ask, clock):
        pair.heartbeat(self.tells(ask, 1))
        clock.advance(IN_TRANSIT_SECONDS)
        pair.heartbeat(ask.heartbeat(1))
        assert state(pair, 1) == "alive"
        assert pair.ranks()[1].reason == ""
        pair.heartbeat(self.tells(ask, 1))
        assert state(pair, 1) == "alive", "what is said again is no news"

    def test_its_place_is_free_for_a_successor(self, pair, ask):
        pair.heartbeat(self.tells(ask, 1))
        pair.join(ask.join(1, life=2))

    def test_its_own_goodbye_is_the_last_word(self, pair, ask):
        pair.leave(ask.leave(1))
        pair.heartbeat(self.tells(ask, 1))
        assert state(pair, 1) == "left"

    def test_also_when_it_comes_later(self, pair, ask):
        pair.heartbeat(self.tells(ask, 1))
        pair.leave(ask.leave(1))
        assert state(pair, 1) == "left"

    def test_nobody_loses_itself_or_a_rank_that_is_not_there(self, registry, ask):
        registry.heartbeat(self.tells(ask, 0, 1))
        assert [info.state for info in registry.ranks()] == ["alive"]

    def test_a_gateway_that_was_restarted_learns_of_it(self, registry, ask):
        registry.heartbeat(ask.heartbeat(1))
        assert registry.heartbeat(self.tells(ask, 1)).failed == [1]

    def test_what_makes_no_sense(self, pair, ask):
        for ranks, said in (([7], "rank 7"), ([1, 1, 1], "3 ranks are said to be gone")):
            with pytest.raises(InvalidRequestError, match=said):
                pair.heartbeat(self.tells(ask, *ranks))

    def test_the_agent_it_was_is_doubted_until_it_is_heard_again(self, pair, ask, clock):
        agent = ask.agent(0)
        agent.pid, agent.host_id = ask.member(1).pid, ask.member(1).host_id
        pair.agents.heartbeat(agent)
        pair.heartbeat(self.tells(ask, 1))
        assert pair.agents.entries()[0].state == "suspect"
        clock.advance(IN_TRANSIT_SECONDS)
        pair.agents.heartbeat(agent)
        assert pair.agents.entries()[0].state == "free"


class TestWatched:
    """A rank whose launcher saw its process end."""

    def test_by_its_process(self, pair, ask):
        pair.process_exited("job", 5, ask.member(1).pid, "host1", "exit code 3")
        assert (state(pair, 0), state(pair, 1)) == ("alive", "failed")
        assert pair.ranks()[1].reason == "exit code 3"

    def test_by_its_rank_when_the_process_was_only_the_parent(self, pair):
        pair.process_exited("job", 1, 4711, "host1", "exit code 3")
        assert state(pair, 1) == "failed"

    def test_a_rank_of_the_same_number_on_another_host_is_another(self, pair):
        pair.process_exited("job", 1, 4711, "host9", "exit code 3")
        pair.process_exited("another job", 1, 4711, "host1", "exit code 3")
        assert state(pair, 1) == "alive"

    def test_it_is_a_better_reason_than_what_peers_saw(self, pair, ask):
        pair.heartbeat(TestLost.tells(ask, 1))
        pair.process_exited("job", 1, ask.member(1).pid, "host1", "signal SIGKILL (9)")
        assert pair.ranks()[1].reason == "signal SIGKILL (9)"

    def test_a_rank_that_left_before_has_left(self, pair, ask):
        pair.leave(ask.leave(1))
        pair.process_exited("job", 1, ask.member(1).pid, "host1", "exit code 3")
        assert state(pair, 1) == "left"


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
