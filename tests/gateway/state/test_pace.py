"""Many ranks: the interval of their heartbeats, the times that follow from it, and the work of a request."""

from __future__ import annotations

import gc
import sys

import pytest

from rankmesh_agent.wire.schemas import LISTED_MEMBERS, LostRank, failed_seconds, suspect_seconds
from rankmesh_gateway.state.job import HEARTBEATS_A_SECOND
from rankmesh_gateway.state.registry import Registry

SIZE = 3 * HEARTBEATS_A_SECOND


def form(registry, ask, size, job="job"):
    futures = [registry.join(ask.join(rank, size, job=job)) for rank in range(size)]
    return futures[0].result(timeout=0)


def test_the_interval_is_a_second_up_to_some_hundred_ranks(registry, ask):
    assert form(registry, ask, 64).interval == 1
    assert registry.heartbeat(ask.heartbeat(0, 64)).interval == 1


def test_it_grows_with_the_ranks_of_all_jobs(registry, ask, clock):
    assert form(registry, ask, SIZE).interval == 3
    form(registry, ask, SIZE, job="another")
    clock.advance(1)
    registry.poll_timeouts()
    assert registry.heartbeat(ask.heartbeat(0, SIZE)).interval == 6
    for rank in range(SIZE):
        registry.leave(ask.leave(rank, job="another"))
    registry.poll_timeouts()
    assert registry.heartbeat(ask.heartbeat(0, SIZE)).interval == 3


def test_the_times_of_silence_follow_the_interval(registry, ask, clock):
    form(registry, ask, SIZE)
    for seconds, state in ((suspect_seconds(3) - 0.1, "alive"), (0.1, "suspect"), (2.9, "suspect"), (0.1, "failed")):
        clock.advance(seconds)
        assert registry.ranks()[0].state == state
    assert clock.now == pytest.approx(1000 + failed_seconds(3))


def test_a_shorter_interval_counts_from_the_second_reply_on(registry, ask, clock):
    """The first one may have been lost."""
    form(registry, ask, SIZE)
    for rank in range(1, SIZE):
        registry.leave(ask.leave(rank))
    assert registry.heartbeat(ask.heartbeat(0, SIZE)).interval == 3
    registry.poll_timeouts()
    assert registry.heartbeat(ask.heartbeat(0, SIZE)).interval == 1
    clock.advance(suspect_seconds(3) - 0.1)
    assert registry.ranks()[0].state == "alive"
    registry.heartbeat(ask.heartbeat(0, SIZE))
    clock.advance(suspect_seconds(1))
    assert registry.ranks()[0].state == "suspect"


def calls(function, *arguments):
    """Return how many Python functions a call enters."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    gc.disable()  # a collection would count the finalizers of other tests' objects
    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("unassigned", [False, True])
def test_no_request_costs_more_in_a_larger_world(ask, clock, unassigned):
    def most(size: int) -> dict[str, int]:
        registry = Registry(clock)
        join = ask.join_unassigned if unassigned else ask.join
        joins = [calls(registry.join, join(rank, size)) for rank in range(size - 1)]
        repeated = calls(registry.join, join(5, size))
        registry.join(join(size - 1, size))
        for rank in range(size):
            registry.heartbeat(ask.heartbeat(rank, size))
        beat = ask.heartbeat(7, size)
        beats = calls(registry.heartbeat, beat)
        beat.lost = [LostRank(9, "closed")]
        return {
            "join": joins[-1],
            "repeated join": repeated,
            "heartbeat": beats,
            "loss": calls(registry.heartbeat, beat),
            "leave": calls(registry.leave, ask.leave(3)),
        }

    few, many = most(50), most(400)
    assert many == few


def test_an_incomplete_world_lists_some_members(registry, ask):
    for rank in range(200):
        registry.join(ask.join(rank, 300))
    reply = registry.join_status(ask.join(0, 300))
    assert [member.rank for member in reply.members] == list(range(LISTED_MEMBERS))
    assert (reply.joined, reply.missing) == (200, list(range(200, 200 + LISTED_MEMBERS)))
    assert registry.join_status(ask.join(0, 300)) is reply, "the same for all"
