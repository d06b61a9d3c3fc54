"""When a rank sends its heartbeats."""

from __future__ import annotations

import pytest
from support.gateway_requests import Clock

from rankmesh_agent.membership.heartbeats import HeartbeatSchedule


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def schedule(clock: Clock) -> HeartbeatSchedule:
    return HeartbeatSchedule(clock, lambda: 0.5)


def test_of_few_ranks_each_tick_sends_one(schedule):
    for _ in range(2):
        assert schedule.is_due(0)
        schedule.set_interval(1.0)


def test_after_a_change_the_ranks_spread_theirs_over_the_interval(schedule, clock):
    schedule.set_interval(8.0)
    for seconds in (4.0, 8.0):
        clock.advance(seconds - 0.1)
        assert not schedule.is_due(0)
        clock.advance(0.1)
        assert schedule.is_due(0)
        schedule.set_interval(8.0)


def test_a_lost_rank_is_reported_early_and_once(schedule, clock):
    schedule.set_interval(9.0)
    schedule.set_interval(9.0)
    assert not schedule.is_due(1)
    clock.advance(2.0)
    assert schedule.is_due(1)
    schedule.set_interval(9.0)
    clock.advance(2.0)
    assert not schedule.is_due(1)


def test_a_heartbeat_without_a_response_is_repeated_soon(schedule, clock):
    schedule.set_interval(9.0)
    schedule.retry()
    clock.advance(1.5)
    assert schedule.is_due(0)
