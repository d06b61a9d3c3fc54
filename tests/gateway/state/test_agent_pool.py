"""Standalone agents: how they are, and who is offered which."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.wire.errors import NoFreeAgentError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, OFFER_SECONDS, SUSPECT_SECONDS, AgentLeave
from rankmesh_gateway.state import agent_pool as agents_module
from rankmesh_gateway.state.agent_pool import FORGET_AGENT_SECONDS, AgentPool
from rankmesh_gateway.state.validation import GatewayFullError


@pytest.fixture
def agents(registry) -> AgentPool:
    return registry.agents


@pytest.fixture
def four(agents, ask) -> AgentPool:
    """Four free agents, two of them on each of two hosts."""
    for number in range(4):
        agents.heartbeat(ask.agent(number, host="left" if number < 2 else "right"))
    return agents


def states(agents) -> dict[str, str]:
    return {entry.agent.name: entry.state for entry in agents.entries()}


def offered(agents, request) -> str:
    """The name of the agent that is offered at once."""
    offer = agents.offer(request)
    assert offer is not None
    return offer.agent.name


class TestHowTheyAre:
    @pytest.mark.parametrize(
        ("silence", "expected"),
        [(0, "free"), (SUSPECT_SECONDS - 0.1, "free"), (SUSPECT_SECONDS, "suspect"), (FAILED_SECONDS, "failed")],
    )
    def test_by_silence(self, agents, ask, clock, silence, expected):
        agents.heartbeat(ask.agent(0))
        clock.advance(silence)
        (entry,) = agents.entries()
        assert (entry.state, entry.agent) == (expected, ask.agent(0))
        assert entry.heartbeat_age == pytest.approx(silence)

    def test_they_are_listed_in_the_natural_order_of_their_names(self, agents, ask):
        for number in (10, 2, 0, 1):
            agents.heartbeat(ask.agent(number))
        assert list(states(agents)) == ["agent-0", "agent-1", "agent-2", "agent-10"]

    def test_after_a_goodbye_it_is_forgotten(self, agents, ask):
        agents.heartbeat(ask.agent(0))
        agents.leave(AgentLeave(ask.agent(0).id))
        agents.leave(AgentLeave("a stranger"))
        assert agents.entries() == []

    def test_after_a_long_silence_it_is_forgotten(self, agents, ask, clock):
        agents.heartbeat(ask.agent(0))
        clock.advance(FORGET_AGENT_SECONDS + 1)
        assert agents.entries() == []


@pytest.mark.parametrize(
    ("elsewhere", "silence", "kept"),
    [
        pytest.param(False, 0, ["a0-2"], id="the same port: it replaces the first"),
        pytest.param(True, 0, ["a0-1", "a0-2"], id="another port while the first is alive: it is another agent"),
        pytest.param(True, SUSPECT_SECONDS, ["a0-2"], id="another port while the first is silent: it replaces it"),
    ],
)
def test_another_agent_of_the_same_name(agents, ask, clock, elsewhere, silence, kept):
    agents.heartbeat(ask.agent(0, leased_to="pid 7"))
    clock.advance(silence)
    other = ask.agent(0, life=2)
    if elsewhere:
        other.urls = ["http://10.0.0.9:8700"]
    agents.heartbeat(other)
    assert [entry.agent.id for entry in agents.entries()] == kept


class TestLimits:
    def test_only_so_many_are_kept(self, agents, ask, clock, monkeypatch):
        monkeypatch.setattr(agents_module, "MAX_AGENTS", 2)
        agents.heartbeat(ask.agent(0))
        clock.advance(FAILED_SECONDS)
        agents.heartbeat(ask.agent(1))
        agents.heartbeat(ask.agent(2))
        assert list(states(agents)) == ["agent-1", "agent-2"], "one that has failed makes room"
        with pytest.raises(GatewayFullError, match="2 standalone agents"):
            agents.heartbeat(ask.agent(3))
        agents.heartbeat(ask.agent(2, leased_to="pid 7"))


LEASED, LAST_ALIVE = {1: "pid 7"}, {0, 1, 2}
CHOICES: dict[str, tuple[dict[int, str], set[int], list[dict[str, Any]], list[int]]] = {
    "rank r gets the r-th": ({}, set(), [{"rank": r} for r in (2, 0, 3, 1)], [2, 0, 3, 1]),
    "the next one if that is leased": (LEASED, set(), [{"rank": r} for r in (1, 3, 2)], [2, 3, 0]),
    "a larger world": ({}, set(), [{"rank": 5, "world_size": 8}], [1]),
    "without a rank, the first": ({}, set(), [{}, {}, {}], [0, 1, 2]),
    "one on the same host first": ({}, set(), [{"rank": r, "host": "right"} for r in (0, 3, 2)], [2, 3, 0]),
    "no silent one": ({}, LAST_ALIVE, [{"rank": 0}], [3]),
}


@pytest.mark.parametrize(("leased", "silent", "requests", "chosen"), CHOICES.values(), ids=CHOICES)
def test_the_choice_of_an_agent(four, ask, clock, leased, silent, requests, chosen):
    clock.advance(SUSPECT_SECONDS if silent else 0)
    for number in set(range(4)) - silent if silent else leased:
        host = "left" if number < 2 else "right"
        four.heartbeat(ask.agent(number, host=host, leased_to=leased.get(number, "")))
    assert [offered(four, ask.lease(**request)) for request in requests] == [f"agent-{number}" for number in chosen]


class TestOffers:
    def test_the_one_that_is_kept_comes_before_a_better_one(self, four, ask):
        four.heartbeat(ask.agent(0, leased_to="pid 7"))
        assert offered(four, ask.lease(0)) == "agent-1"
        four.heartbeat(ask.agent(0))
        assert offered(four, ask.lease(0)) == "agent-1"

    def test_an_offer_that_runs_out_is_for_anyone(self, agents, ask, clock):
        agents.heartbeat(ask.agent(0))
        assert offered(agents, ask.lease(0)) == "agent-0"
        clock.advance(OFFER_SECONDS / 2)
        agents.heartbeat(ask.agent(0))
        assert agents.offer(ask.lease(1)) is None
        clock.advance(OFFER_SECONDS / 2)
        assert offered(agents, ask.lease(1)) == "agent-0"


class TestInVain:
    def test_none_is_free_says_who_has_them(self, agents, ask, clock):
        agents.heartbeat(ask.agent(2))
        clock.advance(SUSPECT_SECONDS + 1)
        agents.heartbeat(ask.agent(0, leased_to="pid 7 on host0", job="training"))
        agents.heartbeat(ask.agent(1))
        agents.offer(ask.lease(3, job="other"))
        error = agents.none_free_error(ask.lease(1))
        assert isinstance(error, NoFreeAgentError)
        assert "none of the 3 standalone agent(s) here is free for rank 1 of job 'job'" in error.message
        assert "agent-0 is leased to pid 7 on host0 for rank 0 of job 'training'" in error.message
        assert "agent-1 is offered to rank 3 of job 'other'" in error.message
        assert "agent-2 is suspect (no sign of life for 4.0 s)" in error.message

    def test_of_many_it_names_some(self, agents, ask):
        for number in range(25):
            agents.heartbeat(ask.agent(number, leased_to="pid 7"))
        message = agents.none_free_error(ask.lease()).message
        assert "agent-19" in message
        assert "agent-20" not in message
        assert "and 5 more" in message
