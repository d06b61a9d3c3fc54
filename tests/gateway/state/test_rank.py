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
