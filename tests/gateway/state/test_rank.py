"""Ranks as the gateway shows them: ages and reasons. The registry's model has their states."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.schemas import FAILED_SECONDS, LostRank
from rankmesh_gateway.state.rank import IN_TRANSIT_SECONDS
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import MAX_REASON, InvalidRequestError


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


def test_the_reason_of_a_lost_rank_names_its_reporter_until_its_next_heartbeat(pair, ask, clock):
    pair.heartbeat(report(ask, 1))
    assert pair.ranks()[1].reason == "rank 0 (host0, pid 100) lost its connection to it: connection reset"
    clock.advance(IN_TRANSIT_SECONDS)
    pair.heartbeat(ask.heartbeat(1))
    assert (pair.ranks()[1].state, pair.ranks()[1].reason) == ("alive", "")
    pair.heartbeat(report(ask, 1))
    assert pair.ranks()[1].state == "alive", "that report is the same"


def test_the_launcher_knows_a_better_reason_than_the_peers(pair, ask):
    pair.heartbeat(report(ask, 1))
    pair.process_exited("another job", 1, ask.member(1).pid, "host1", "exit code 3")
    pair.process_exited("job", 1, ask.member(1).pid, "host1", "signal SIGKILL (9)")
    assert pair.ranks()[1].reason == "signal SIGKILL (9)"


@pytest.mark.parametrize(("ranks", "message"), [([7], "rank 7"), ([1, 1, 1], "3 ranks are reported lost")])
def test_invalid_reports(pair, ask, ranks, message):
    with pytest.raises(InvalidRequestError, match=message):
        pair.heartbeat(report(ask, *ranks))


def test_the_agent_of_a_lost_rank_is_suspect_until_its_next_heartbeat(pair, ask, clock):
    agent = ask.agent(0)
    agent.pid, agent.host_id = ask.member(1).pid, ask.member(1).host_id
    pair.agents.heartbeat(agent)
    pair.heartbeat(report(ask, 1))
    pair.agents.heartbeat(agent)
    assert pair.agents.entries()[0].state == "suspect", "that heartbeat was in transit"
    clock.advance(IN_TRANSIT_SECONDS)
    pair.agents.heartbeat(agent)
    assert pair.agents.entries()[0].state == "free"


def test_the_first_report_of_a_loss_and_the_first_leave_count(pair, ask, clock):
    record = pair._jobs["job"].epochs[1].records[1]
    assert record.report_lost("seen by rank 0", clock())
    assert not record.report_lost("seen by rank 2", clock())
    assert record.reason == "seen by rank 0"
    pair.leave(ask.leave(1, reason="first"))
    pair.leave(ask.leave(1, reason="second"))
    assert pair.ranks()[1].reason == "first"
