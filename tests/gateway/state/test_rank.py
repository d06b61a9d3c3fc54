"""Ranks as the gateway shows them: ages and reasons. The registry's model has their states."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.fields import MAX_REASON
from rankmesh_agent.wire.schemas import FAILED_SECONDS, LostRank
from rankmesh_gateway.state.rank import IN_TRANSIT_SECONDS
from rankmesh_gateway.state.registry import Registry


@pytest.fixture
def pair(registry, ask) -> Registry:
    """A registry with a complete world of two."""
    for rank in range(2):
        registry.join(ask.join(rank))
    return registry


def report(ask, *ranks):
    """A heartbeat of rank 0 that reports these ranks lost."""
    beat = ask.heartbeat(0)
    beat.lost = [LostRank(rank, "connection reset") for rank in ranks]
    return beat


def test_the_age_of_the_heartbeat_and_the_reason_of_a_silent_rank(pair, ask, clock):
    clock.advance(5)
    pair.heartbeat(ask.heartbeat(1))
    clock.advance(FAILED_SECONDS)
    assert pair.ranks()[1].heartbeat_age == pytest.approx(FAILED_SECONDS)
    assert pair.ranks()[1].reason == "no heartbeat for 10.0 s"


def test_a_reason_has_a_limit(pair, ask):
    pair.leave(ask.leave(1, reason="x" * 2 * MAX_REASON))
    assert pair.ranks()[1].reason == "x" * MAX_REASON


def test_the_loss_of_a_rank_is_final_and_names_its_reporter(pair, ask, clock):
    pair.heartbeat(report(ask, 1))
    clock.advance(IN_TRANSIT_SECONDS)
    beat = ask.heartbeat(1)
    beat.lost = [LostRank(0, "connection reset")]
    assert pair.heartbeat(beat).failed == [1], "the rank learns of it, and accuses nobody"
    assert [(rank.state, rank.reason) for rank in pair.ranks()] == [
        ("alive", ""),
        ("failed", "rank 0 (host0, pid 100) lost its connection to it: connection reset"),
    ]


def test_an_old_report_of_a_loss_does_not_end_the_next_process_of_the_rank(pair, ask):
    pair.heartbeat(report(ask, 1))
    pair.heartbeat(ask.heartbeat(1, life=2))
    assert pair.heartbeat(report(ask, 1)).failed == []
    pair.heartbeat(report(ask))
    assert pair.heartbeat(report(ask, 1)).failed == [1], "a new one does"


def test_silence_for_too_long_is_final(pair, ask, clock):
    clock.advance(FAILED_SECONDS)
    pair.heartbeat(ask.heartbeat(0))
    assert pair.heartbeat(ask.heartbeat(1)).failed == [1]
    clock.advance(1)
    assert pair.heartbeat(ask.heartbeat(1)).failed == [1]
    assert (pair.ranks()[1].state, pair.ranks()[1].reason) == (
        "failed",
        "no heartbeat for 10.0 s; the failure is final for its epoch, and later heartbeats are ignored",
    )


class TestAStoppedProcess:
    """It sends nothing, and its connections stand: its peers wait for it, and it may go on."""

    def beat(self, ask, *lost):
        beat = report(ask, *lost)
        beat.watches_peers = True
        return beat

    def test_it_is_suspect_until_it_goes_on(self, pair, ask, clock):
        for _ in range(3):
            clock.advance(FAILED_SECONDS - 1)
            assert pair.heartbeat(self.beat(ask)).failed == []
        assert [rank.state for rank in pair.ranks()] == ["alive", "suspect"]
        pair.heartbeat(ask.heartbeat(1))
        assert [rank.state for rank in pair.ranks()] == ["alive", "alive"]

    def test_it_fails_with_its_connection(self, pair, ask, clock):
        pair.heartbeat(self.beat(ask))
        clock.advance(FAILED_SECONDS - 1)
        assert pair.heartbeat(self.beat(ask, 1)).failed == [1]

    def test_the_silent_do_not_vouch_for_each_other(self, pair, ask, clock):
        pair.heartbeat(self.beat(ask))
        clock.advance(FAILED_SECONDS)
        assert [rank.state for rank in pair.ranks()] == ["failed", "failed"]


class TestASuspendedGateway:
    @pytest.fixture(autouse=True)
    def _scanned(self, pair):
        pair.expect_scans(True)

    def test_its_own_pause_is_no_silence(self, pair, ask, clock):
        pair.agents.heartbeat(ask.agent(0))
        clock.advance(1)
        pair.poll_timeouts()
        clock.advance(FAILED_SECONDS + 2)
        assert pair.heartbeat(ask.heartbeat(0)).failed == []
        assert [rank.state for rank in pair.ranks()] == ["alive", "alive"]
        assert pair.ranks()[1].heartbeat_age == pytest.approx(1)
        assert pair.agents.entries()[0].state == "free"

    def test_silence_while_it_runs_counts(self, pair, clock):
        for _ in range(int(FAILED_SECONDS)):
            clock.advance(1)
            pair.poll_timeouts()
        assert [rank.state for rank in pair.ranks()] == ["failed", "failed"]


def test_the_launcher_knows_a_better_reason_than_the_peers(pair, ask):
    pair.heartbeat(report(ask, 1))
    pair.process_exited("another job", 1, ask.member(1).pid, "host1", "exit code 3")
    pair.process_exited("job", 1, ask.member(1).pid, "host1", "signal SIGKILL (9)")
    assert pair.ranks()[1].reason == "signal SIGKILL (9)"


def test_the_agent_of_a_lost_rank_is_suspect_until_its_next_heartbeat(pair, ask, clock):
    agent = ask.agent(0, leased_to="pid 7")
    agent.pid, agent.host_id = ask.member(1).pid, ask.member(1).host_id
    pair.agents.heartbeat(agent)
    pair.heartbeat(report(ask, 1))
    pair.agents.heartbeat(agent)
    assert pair.agents.entries()[0].state == "suspect", "that heartbeat was in transit"
    clock.advance(IN_TRANSIT_SECONDS)
    pair.agents.heartbeat(agent)
    assert pair.agents.entries()[0].state == "leased"


def test_a_lost_rank_makes_no_agent_suspect_that_is_not_leased_for_its_job(pair, ask):
    """Whatever process the rank has said to be."""
    for agent in (ask.agent(0), ask.agent(1, leased_to="pid 7", job="another job")):
        agent.pid, agent.host_id = ask.member(1).pid, ask.member(1).host_id
        pair.agents.heartbeat(agent)
    pair.heartbeat(report(ask, 1))
    assert [entry.state for entry in pair.agents.entries()] == ["free", "leased"]


def test_the_first_report_of_a_loss_and_the_first_leave_count(pair, ask):
    record = pair._jobs["job"].epochs[1].records[1]
    assert record.fail("seen by rank 0")
    assert not record.fail("seen by rank 2")
    assert record.reason == "seen by rank 0"
    pair.leave(ask.leave(1, reason="first"))
    pair.leave(ask.leave(1, reason="second"))
    assert pair.ranks()[1].reason == "first"
