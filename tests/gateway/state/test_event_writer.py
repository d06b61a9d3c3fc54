"""What the event log is told: each change once, with the time when it was so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, AgentLeave, GroupInfo, LostRank
from rankmesh_gateway.state.rank import IN_TRANSIT_SECONDS


class Reader:
    """Reads the log as somebody who watches."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.position = registry.events.resume_position(None)

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """What is new."""
        self.registry.poll_timeouts()
        found = self.registry.events.since(self.position)
        self.position = self.registry.events.last
        return [(event.kind, json.loads(event.data)) for event in found]

    def kinds(self) -> list[tuple[str, list[int]]]:
        return [(kind, said["ranks"]) for kind, said in self.read()]


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
        assert [(kind, said["ranks"]) for kind, said in found] == [
            ("rank-joining", [1]),
            ("rank-joining", []),
            ("world-complete", [0, 1]),
        ]
        assert found[0][1]["detail"] == "rank 1 (host1, pid 101) joins: 1 of 2 are there"
        assert all((said["job"], said["epoch"]) == ("job", 1) for _, said in found)

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
        ((kind, said),) = new.read()
        assert (kind, said["ranks"]) == ("rank-suspect", [1])
        clock.advance(FAILED_SECONDS - SUSPECT_SECONDS)
        registry.heartbeat(ask.heartbeat(0))
        ((kind, later),) = new.read()
        assert (kind, later["ranks"]) == ("rank-failed", [1])
        assert later["time"] == pytest.approx(said["time"], abs=1.5), "each 1 s ago, by the clock that was turned"
        assert new.read() == []

    def test_after_a_long_silence_only_the_failure(self, clock, new):
        clock.advance(FAILED_SECONDS + 5)
        assert new.kinds() == [("rank-failed", [0]), ("rank-failed", [1])]

    def test_one_that_comes_back(self, registry, ask, clock, new):
        clock.advance(SUSPECT_SECONDS)
        new.read()
        registry.heartbeat(ask.heartbeat(1))
        ((kind, said),) = new.read()
        assert (kind, said["ranks"]) == ("rank-alive", [1])
        assert "alive again, after it was suspect" in said["detail"]

    def test_goodbyes(self, registry, ask, new):
        registry.leave(ask.leave(0))
        registry.leave(ask.leave(1, reason="exit code 3"))
        (left, failed) = new.read()
        assert (left[0], left[1]["ranks"]) == ("rank-left", [0])
        assert (failed[0], failed[1]["detail"]) == ("rank-failed", "rank 1 (host1, pid 101) has failed: exit code 3")

    def test_one_that_another_lost(self, registry, ask, clock, new):
        beat = ask.heartbeat(0)
        beat.lost = [LostRank(1, "connection reset")]
        registry.heartbeat(beat)
        registry.heartbeat(beat)
        ((kind, said),) = new.read()
        assert kind == "rank-failed"
        assert "rank 0 (host0, pid 100) lost its connection to it: connection reset" in said["detail"]
        clock.advance(IN_TRANSIT_SECONDS)
        registry.heartbeat(ask.heartbeat(1))
        registry.heartbeat(beat)
        assert new.kinds() == [("rank-alive", [1])]

    def test_what_a_restarted_gateway_learns(self, registry, ask, new):
        registry.heartbeat(ask.heartbeat(0, epoch=7))
        assert new.kinds() == [("rank-alive", [0])]


class TestGroups:
    def test_a_life(self, registry, ask, new):
        form(registry, ask)
        new.read()
        registry.heartbeat(ask.heartbeat(0, 2, group()))
        registry.heartbeat(ask.heartbeat(1, 2, group()))
        ((kind, said),) = new.read()
        assert (kind, said["ranks"], said["group"]) == ("group-made", [0, 1], group().id)
        registry.heartbeat(ask.heartbeat(0, 2, group(failure="rank 1 strayed")))
        registry.heartbeat(ask.heartbeat(1, 2, group(failure="rank 1 strayed")))
        ((kind, said),) = new.read()
        assert (kind, said["detail"]) == ("group-failed", "group 'pair' has failed: rank 1 strayed")
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
