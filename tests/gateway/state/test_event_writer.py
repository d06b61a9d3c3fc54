"""Events in the log: each change once, with its time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, AgentLeave, GroupInfo, LostRank


class Reader:
    """Reads the log as a listener does."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.position = registry.events.resume_position(None)

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the new events."""
        self.registry.poll_timeouts()
        found = self.registry.events.since(self.position)
        self.position = self.registry.events.last
        return [(event.kind, json.loads(event.data)) for event in found]

    def kinds(self) -> list[tuple[str, list[int]]]:
        return [(kind, data["ranks"]) for kind, data in self.read()]


@pytest.fixture
def new(registry) -> Reader:
    return Reader(registry)


def group(name: str = "pair", *ranks: int, failure: str = "") -> GroupInfo:
    return GroupInfo(f"{len(name):016x}", name, list(ranks or (0, 1)), 1, "shm", "", failure)


def form(registry, ask, size: int = 2) -> None:
    for rank in range(size):
        registry.join(ask.join(rank, size))


class TestJoining:
    def test_a_world_comes_together(self, registry, ask, new):
        registry.join(ask.join(1, 2))
        registry.join(ask.join(1, 2))
        registry.join(ask.join_unassigned(7, 2))
        found = new.read()
        assert [(kind, data["ranks"]) for kind, data in found] == [
            ("rank-joining", [1]),
            ("rank-joining", []),
            ("world-complete", [0, 1]),
        ]
        assert found[0][1]["detail"] == "rank 1 (host1, pid 101) has joined: 1 of 2 ranks"
        assert all((data["job"], data["epoch"]) == ("job", 1) for _, data in found)

    def test_one_that_gives_up(self, registry, ask, new):
        registry.join(ask.join(1, 2)).cancel()
        registry.withdraw_join(ask.join(1, 2))
        assert new.kinds() == [("rank-joining", [1]), ("rank-left", [1])]


class TestRanks:
    @pytest.fixture(autouse=True)
    def _pair(self, registry, ask, new):
        form(registry, ask)
        new.read()

    def test_silence(self, registry, ask, clock, new):
        clock.advance(SUSPECT_SECONDS + 1)
        registry.heartbeat(ask.heartbeat(0))
        ((kind, suspect),) = new.read()
        assert (kind, suspect["ranks"]) == ("rank-suspect", [1])
        clock.advance(FAILED_SECONDS - SUSPECT_SECONDS)
        registry.heartbeat(ask.heartbeat(0))
        ((kind, failed),) = new.read()
        assert (kind, failed["ranks"]) == ("rank-failed", [1])
        assert failed["time"] == pytest.approx(suspect["time"], abs=1.5), "each 1 s ago, by the clock that was turned"
        assert new.read() == []
        registry.heartbeat(ask.heartbeat(1))
        assert new.read() == [], "the failure is final"

    def test_a_pause(self, registry, ask, clock, new):
        clock.advance(SUSPECT_SECONDS)
        registry.poll_timeouts()
        new.read()
        registry.heartbeat(ask.heartbeat(1))
        ((kind, back),) = new.read()
        assert (kind, back["ranks"]) == ("rank-alive", [1])
        assert "alive again, after it was suspect" in back["detail"]

    def test_the_end_of_ranks(self, registry, ask, new):
        beat = ask.heartbeat(0)
        beat.lost = [LostRank(1, "connection reset")]
        registry.heartbeat(beat)
        registry.leave(ask.leave(0))
        (failed, left) = new.read()
        assert failed[0] == "rank-failed"
        assert "rank 0 (host0, pid 100) lost its connection to it: connection reset" in failed[1]["detail"]
        assert (left[0], left[1]["detail"]) == ("rank-left", "rank 0 (host0, pid 100) has left")

    def test_a_restarted_gateway(self, registry, ask, new):
        registry.heartbeat(ask.heartbeat(0, epoch=7))
        ((kind, alive),) = new.read()
        assert (kind, alive["detail"]) == ("rank-alive", "rank 0 (host0, pid 100) is alive")


class TestGroups:
    def test_a_life(self, registry, ask, new):
        form(registry, ask)
        new.read()
        registry.heartbeat(ask.heartbeat(0, 2, group()))
        registry.heartbeat(ask.heartbeat(1, 2, group()))
        ((kind, data),) = new.read()
        assert (kind, data["ranks"], data["group"]) == ("group-made", [0, 1], group().id)
        registry.heartbeat(ask.heartbeat(0, 2, group(failure="rank 1 strayed")))
        registry.heartbeat(ask.heartbeat(1, 2, group(failure="rank 1 strayed")))
        ((kind, data),) = new.read()
        assert (kind, data["detail"]) == ("group-failed", "group pair has failed: rank 1 strayed")
        registry.heartbeat(ask.heartbeat(0, 2))
        assert new.read() == []
        registry.heartbeat(ask.heartbeat(1, 2))
        assert new.kinds() == [("group-ended", [0, 1])]

    def test_it_ends_with_its_last_member(self, registry, ask, new):
        for rank in range(2):
            registry.heartbeat(ask.heartbeat(rank, 2, group()))
        new.read()
        registry.leave(ask.leave(0))
        assert new.kinds() == [("rank-left", [0])]
        registry.leave(ask.leave(1))
        assert new.kinds() == [("rank-left", [1]), ("group-ended", [0, 1])]

    def test_one_whose_members_have_all_dropped_it_but_those_that_failed(self, registry, ask, clock, new):
        for rank in range(2):
            registry.heartbeat(ask.heartbeat(rank, 2, group()))
        new.read()
        clock.advance(FAILED_SECONDS)
        registry.heartbeat(ask.heartbeat(0, 2, group(failure="rank 1 failed")))
        new.read()
        registry.heartbeat(ask.heartbeat(0, 2))
        assert ("group-ended", [0, 1]) in new.kinds()
        assert registry.groups() == []

    def test_the_cause_comes_before_what_it_broke(self, registry, ask, new):
        for rank in range(2):
            registry.heartbeat(ask.heartbeat(rank, 2, group()))
        new.read()
        beat = ask.heartbeat(0, 2, group(failure="rank 1 failed"))
        beat.lost = [LostRank(1, "closed")]
        registry.heartbeat(beat)
        assert [kind for kind, _ in new.kinds()] == ["rank-failed", "group-failed"]


class TestAgents:
    def test_a_life(self, registry, ask, clock, new):
        agents = registry.agents
        agents.heartbeat(ask.agent(0))
        agents.heartbeat(ask.agent(0))
        agents.heartbeat(ask.agent(0, leased_to="pid 7"))
        agents.heartbeat(ask.agent(0))
        clock.advance(FAILED_SECONDS)
        found = new.read()
        agents.heartbeat(ask.agent(0))
        agents.leave(AgentLeave(ask.agent(0).id))
        found += new.read()
        assert [kind for kind, _ in found] == [
            "agent-registered",
            "agent-leased",
            "agent-freed",
            "agent-lost",
            "agent-registered",
            "agent-lost",
        ]
        leased = found[1][1]
        assert (leased["job"], leased["ranks"], leased["agent"]) == ("job", [0], "agent-0")
        assert leased["detail"] == "agent agent-0 (host0, pid 50) is leased to pid 7 for rank 0 of job 'job'"

    def test_one_that_another_replaces(self, registry, ask, new):
        registry.agents.heartbeat(ask.agent(0))
        registry.agents.heartbeat(ask.agent(0, life=2))
        assert [kind for kind, _ in new.kinds()] == ["agent-registered", "agent-lost", "agent-registered"]
