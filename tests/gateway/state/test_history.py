"""History of the rates, and of the calls that were held up."""

from __future__ import annotations

import json

import pytest

from rankmesh_agent.wire.schemas import GroupInfo, InFlight, ResourceUsage
from rankmesh_gateway.schemas import HELD_UP_SECONDS, RateSample
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.history import HISTORY_SECONDS, SAMPLE_SECONDS, History

WORLD = "00000000000000aa"


def world(seq: int, *, seconds: float = 0.0, call_age: float | None = None) -> GroupInfo:
    calls = [] if call_age is None else [InFlight("all_reduce(float32[8], SUM)", seq, call_age, 32)]
    return GroupInfo(WORLD, "world", [0, 1], seq, "shm", "", "", 100 * seq, calls, seconds)


@pytest.fixture
def beat(registry, ask):
    for rank in range(2):
        registry.join(ask.join(rank, 2))

    def report(rank: int, group: GroupInfo) -> None:
        body = ask.heartbeat(rank, 2)
        body.groups = [group]
        registry.heartbeat(body)

    return report


class TestRates:
    def test_a_sample_every_two_seconds(self, registry, beat, clock):
        for second in range(5):
            for rank in range(2):
                beat(rank, world(10 * second))
            registry.poll_timeouts()
            clock.advance(1)
        assert registry.rate_history() == [
            RateSample(5, 0.0, 0.0),
            RateSample(3, 10.0, 2000.0),
            RateSample(1, 10.0, 2000.0),
        ]

    def test_old_samples_go(self, registry, clock):
        for _ in range(3 * int(HISTORY_SECONDS / SAMPLE_SECONDS)):
            registry.poll_timeouts()
            clock.advance(SAMPLE_SECONDS)
        ages = [sample.age for sample in registry.rate_history()]
        assert ages == sorted(ages, reverse=True)
        assert (ages[0], ages[-1]) == (HISTORY_SECONDS, SAMPLE_SECONDS)
        clock.advance(HISTORY_SECONDS)
        assert registry.rate_history() == []

    def test_where_a_sample_takes_long_they_are_fewer(self, registry):
        spent = iter(range(100))
        history = History(EventWriter(registry.events), lambda: 0.0625 * next(spent))
        for second in range(20):
            history.observe([], float(second))
        assert [sample.age for sample in history.samples(20.0)] == [20, 13, 6], "6.25 s apart, which is 1 % of a core"


class TestHeldUpCalls:
    @pytest.fixture
    def new(self, registry):
        def read() -> list[tuple[str, list[int], str]]:
            registry.poll_timeouts()
            found = [(each, json.loads(each.data)) for each in registry.events.since(position.pop())]
            position.append(registry.events.last)
            return [(each.kind, data["ranks"], data["detail"]) for each, data in found if each.kind.startswith("call")]

        position = [registry.events.last]
        return read

    def test_one_that_goes_on(self, beat, clock, new):
        call = "all_reduce(float32[8], SUM) #7 in group world has been held up"
        beat(1, world(6))
        for age in (0.0, HELD_UP_SECONDS - 2):
            beat(0, world(7, call_age=age))
            clock.advance(1)
        assert new() == []
        for _ in range(3):
            clock.advance(2)
            beat(0, world(7, call_age=HELD_UP_SECONDS + 1))
            beat(1, world(6))
            found = new()
            if found:
                assert found == [("call-held-up", [1], f"{call} for 11.0 s by rank 1 (host1, pid 101, alive)")]
                break
        clock.advance(2)
        beat(0, world(7, call_age=30.0))
        beat(1, world(6))
        assert new() == [], "once"
        clock.advance(4)
        for rank in range(2):
            beat(rank, world(8))
        assert new() == [("call-ended", [1], f"{call} for 17.0 s by rank 1 (host1, pid 101, alive), and has ended")]
        assert new() == []

    def test_one_whose_world_ends(self, registry, ask, beat, clock, new):
        beat(1, world(6))
        clock.advance(2)
        beat(0, world(7, call_age=20.0))
        assert [kind for kind, _, _ in new()] == ["call-held-up"]
        for rank in range(2):
            registry.leave(ask.leave(rank, reason="ended"))
        clock.advance(3)
        assert [kind for kind, _, _ in new()] == ["call-ended"]
        clock.advance(3)
        assert new() == []


class TestSlowRanks:
    def test_one_that_makes_the_other_wait_and_no_longer_does(self, registry, beat, clock):
        position, scores = registry.events.last, []
        for second in range(60):  # rank 0 waits in the first 30 seconds
            beat(0, world(10 * second, seconds=0.3 * min(second, 30)))
            beat(1, world(10 * second))
            registry.poll_timeouts()
            clock.advance(1)
            scores.append([rank.slow for rank in registry.ranks()])
        assert scores[20] == [0.0, pytest.approx(0.3)]
        found = [(each.kind, json.loads(each.data)) for each in registry.events.since(position)]
        found = [(kind, data["ranks"], data["detail"]) for kind, data in found if data["detail"].startswith("rank 1")]
        rank = "rank 1 (host1, pid 101)"
        assert found == [
            ("rank-slow", [1], f"{rank} makes the others wait 30% of the time, since 12.0 s ago"),
            ("rank-in-time", [1], f"{rank} no longer makes the others wait"),
        ]

    def test_what_it_does_meanwhile(self, registry, beat, ask, clock):
        for second in range(20):
            beat(0, world(10 * second, seconds=0.3 * second))
            body = ask.heartbeat(1, 2)
            body.groups, body.usage = [world(10 * second)], ResourceUsage(0.6 * second, 0.4 * second, 0, 50 << 20, "R")
            registry.heartbeat(body)
            registry.poll_timeouts()
            clock.advance(1)
        (detail,) = (event.data for event in registry.events.since(0) if event.kind == "rank-slow")
        assert "; it waits for a core 40% of the time: other programs run on its host" in detail
        ranks = registry.ranks()
        assert [rank.usage for rank in ranks] == [
            None,
            ResourceUsage(pytest.approx(0.6), pytest.approx(0.4), 0, 50 << 20, "R"),
        ]

    def test_one_that_ends_is_not_in_time(self, registry, ask, beat, clock):
        for second in range(20):
            beat(0, world(10 * second, seconds=0.3 * second))
            beat(1, world(10 * second))
            registry.poll_timeouts()
            clock.advance(1)
        registry.leave(ask.leave(1))
        clock.advance(3)
        registry.poll_timeouts()
        assert registry.events.counts()["rank-slow"] == 1
        assert registry.events.counts()["rank-in-time"] == 0


def test_the_share_of_time_in_operations(registry, beat, clock):
    for rank in range(2):
        beat(rank, world(1, seconds=0.5))
    clock.advance(2)
    beat(0, world(5, seconds=2.0))
    beat(1, world(5, seconds=9.0))
    (group,) = registry.groups()
    assert group.busy == {"0": 0.75, "1": 1.0}, "of two seconds; operations of several threads add up to more"
