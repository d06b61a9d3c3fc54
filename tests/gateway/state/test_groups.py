"""Groups, put together from what their members report."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, GroupInfo, InFlight
from rankmesh_gateway.schemas import HELD_UP_SECONDS
from rankmesh_gateway.state.groups import GroupNotFoundError


def world(seq: int, failure: str = "") -> GroupInfo:
    return GroupInfo("00000000000000aa", "world", [0, 1], seq, "shm", "all_reduce", failure)


def test_the_age_of_each_members_count(registry, ask, clock):
    registry.heartbeat(ask.heartbeat(0, 2, world(41)))
    clock.advance(0.5)
    registry.heartbeat(ask.heartbeat(1, 2, world(40)))
    clock.advance(0.25)
    assert registry.groups()[0].ages == {"0": 0.75, "1": 0.25}


def test_the_first_failure_counts(registry, ask, clock):
    registry.heartbeat(ask.heartbeat(1, 2, world(5, "rank 0 failed")))
    clock.advance(1)
    registry.heartbeat(ask.heartbeat(0, 2, world(5, "aborted by rank 1")))
    clock.advance(1)
    registry.heartbeat(ask.heartbeat(1, 2, world(5, "rank 0 failed")))
    assert [group.failure for group in registry.groups()] == ["rank 0 failed"]


def test_a_failed_rank_shows_where_it_stopped_and_one_that_left_does_not(registry, ask, clock):
    for rank in range(2):
        registry.heartbeat(ask.heartbeat(rank, 2, world(7)))
    clock.advance(FAILED_SECONDS)
    assert registry.groups()[0].seqs == {"0": 7, "1": 7}
    registry.leave(ask.leave(1))
    assert registry.groups()[0].seqs == {"0": 7}
    registry.leave(ask.leave(0))
    assert registry.groups() == []


class TestRates:
    """How much groups do, from one heartbeat to the next."""

    @staticmethod
    def report(registry, ask, rank, seq, nbytes):
        group = world(seq)
        group.bytes = nbytes
        registry.heartbeat(ask.heartbeat(rank, 2, group))

    def rate(self, registry) -> tuple[float, float]:
        (group,) = registry.groups()
        return group.operations_rate, group.bytes_rate

    def test_operations_of_the_quickest_and_bytes_of_all(self, registry, ask, clock):
        for rank in range(2):
            self.report(registry, ask, rank, 10, 1000)
        assert self.rate(registry) == (0.0, 0.0)
        clock.advance(2)
        self.report(registry, ask, 0, 30, 3000)
        self.report(registry, ask, 1, 28, 2800)
        assert self.rate(registry) == (10.0, 1900.0)

    def test_heartbeats_close_together_give_none(self, registry, ask, clock):
        self.report(registry, ask, 0, 0, 0)
        clock.advance(1)
        self.report(registry, ask, 0, 5, 50)
        clock.advance(0.001)
        self.report(registry, ask, 0, 6, 60)
        assert self.rate(registry) == (5.0, 50.0)
        clock.advance(0.999)
        self.report(registry, ask, 0, 10, 100)
        assert self.rate(registry) == (5.0, 50.0)

    def test_the_silent_do_nothing(self, registry, ask, clock):
        self.report(registry, ask, 0, 0, 0)
        clock.advance(1)
        self.report(registry, ask, 0, 5, 50)
        clock.advance(SUSPECT_SECONDS)
        assert self.rate(registry) == (0.0, 0.0)

    def test_a_count_that_goes_back_is_no_rate(self, registry, ask, clock):
        self.report(registry, ask, 0, 10, 100)
        clock.advance(1)
        self.report(registry, ask, 0, 0, 0)
        assert self.rate(registry) == (0.0, 0.0)


class TestInFlight:
    """Who holds up whom."""

    @staticmethod
    def report(registry, ask, rank, seq, *calls):
        group = GroupInfo("00000000000000aa", "world", [0, 1, 2], seq, "shm", "", "")
        group.inflight = list(calls)
        registry.heartbeat(ask.heartbeat(rank, 3, group))

    def test_arrived_missing_and_done(self, registry, ask, clock):
        call = InFlight("all_reduce(sum, float32 x 4)", 7, 1.5, 16)
        self.report(registry, ask, 0, 7, call)
        self.report(registry, ask, 1, 6)
        self.report(registry, ask, 2, 7)
        clock.advance(0.5)
        (found,) = registry.in_flight()
        assert (found.group, found.name, found.op, found.seq) == ("00000000000000aa", "world", call.op, 7)
        assert (found.arrived, found.missing, found.bytes, found.differing) == ([0], [1], 16, {})
        assert found.age == pytest.approx(2.0)

    def test_held_up(self, registry, ask, clock):
        self.report(registry, ask, 0, 3, InFlight("barrier", 3, 2.0, 0))
        self.report(registry, ask, 1, 3)
        self.report(registry, ask, 2, 2)
        clock.advance(HELD_UP_SECONDS - 2.1)
        assert not registry.in_flight()[0].held_up
        clock.advance(0.1)
        assert registry.in_flight()[0].held_up
        self.report(registry, ask, 2, 3)
        assert not registry.in_flight()[0].held_up, "no rank is missing"

    def test_a_rank_that_has_not_reported_the_group_is_missing(self, registry, ask):
        for rank in range(3):
            registry.join(ask.join(rank, 3))
        self.report(registry, ask, 0, 1, InFlight("barrier", 1, 2.0, 0))
        assert registry.in_flight()[0].missing == [1, 2]
        registry.leave(ask.leave(2))
        assert registry.in_flight()[0].missing == [1]

    def test_several_calls_the_earliest_first(self, registry, ask):
        self.report(registry, ask, 0, 8, InFlight("b", 8, 0.1, 8), InFlight("a", 7, 0.2, 4))
        self.report(registry, ask, 1, 7, InFlight("a", 7, 3.0, 4))
        self.report(registry, ask, 2, 0)
        first, second = registry.in_flight("job")
        assert (first.seq, first.arrived, first.missing, first.age) == (7, [0, 1], [2], 3.0)
        assert (second.seq, second.arrived, second.missing) == (8, [0], [1, 2])
        assert registry.in_flight("another job") == []

    def test_members_that_make_another_call(self, registry, ask):
        self.report(registry, ask, 0, 7, InFlight("all_reduce(sum, float32 x 4)", 7, 1.0, 16))
        self.report(registry, ask, 1, 7, InFlight("barrier()", 7, 1.0, 0))
        (found,) = registry.in_flight()
        assert found.arrived == [0, 1]
        assert found.differing == {"1": "barrier()"}

    def test_of_a_rank_that_failed_no_call_is_under_way(self, registry, ask, clock):
        self.report(registry, ask, 0, 7, InFlight("a", 7, 1.0, 16))
        clock.advance(FAILED_SECONDS)
        assert registry.in_flight() == []


class TestNames:
    def test_a_name_that_two_jobs_have(self, registry, ask):
        for job in ("a", "b"):
            registry.heartbeat(ask.heartbeat(0, 2, world(1), job=job))
        with pytest.raises(GroupNotFoundError, match="2 groups are called 'world'"):
            registry.find_group("world")
        assert registry.find_group("world", "b")[0].job == "b"

    def test_an_earlier_epoch_that_is_over_does_not_count(self, registry, ask, clock):
        for epoch in (1, 2):
            registry.heartbeat(ask.heartbeat(0, 2, world(1), epoch=epoch))
        with pytest.raises(GroupNotFoundError, match="2 groups are called 'world'"):
            registry.find_group("world")
        clock.advance(FAILED_SECONDS)
        registry.heartbeat(ask.heartbeat(0, 2, world(1), epoch=2))
        assert registry.find_group("world")[0].epoch == 2

    def test_none(self, registry):
        with pytest.raises(GroupNotFoundError, match="no rank reports a group 'x'"):
            registry.find_group("x")
