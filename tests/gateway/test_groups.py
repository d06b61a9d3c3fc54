"""Groups, put together from what their members report."""

from __future__ import annotations

from rankmesh_agent.wire.schemas import FAILED_SECONDS, GroupInfo, RankGroupInfo


def world(seq: int, failure: str = "") -> GroupInfo:
    return GroupInfo("00000000000000aa", "world", [0, 1], seq, "shm", "all_reduce", failure)


def half(seq: int) -> GroupInfo:
    return GroupInfo("00000000000000bb", "half", [1], seq, "self", "", "")


def test_the_members_are_put_together(registry, ask):
    registry.heartbeat(ask.heartbeat(0, 2, world(41)))
    registry.heartbeat(ask.heartbeat(1, 2, world(40), half(3)))
    assert registry.groups() == [
        RankGroupInfo("job", 1, "00000000000000aa", "world", [0, 1], "shm", {"0": 41, "1": 40}, ""),
        RankGroupInfo("job", 1, "00000000000000bb", "half", [1], "self", {"1": 3}, ""),
    ]


def test_one_job_or_all(registry, ask):
    for job in ("b", "a"):
        registry.heartbeat(ask.heartbeat(0, 2, world(1), job=job))
    assert [group.job for group in registry.groups()] == ["a", "b"]
    assert [group.job for group in registry.groups("b")] == ["b"]
    assert registry.groups("c") == []


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
