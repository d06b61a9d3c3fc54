"""Heartbeats that name the changes since an earlier one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankmesh_agent.membership.heartbeats import HeartbeatChanges
from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS, LISTED_RANKS, GroupInfo, LostRank
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import MAX_GROUPS

SIZE = LISTED_RANKS + 1


def world(seq: int, *, size: int = 2, failure: str = "") -> GroupInfo:
    return GroupInfo("world", "world", list(range(size)), seq, "shm", "", failure)


def half(seq: int) -> GroupInfo:
    return GroupInfo("half", "half", [0], seq, "self", "", "")


class Rank:
    """A rank that sends heartbeats as its agent does.

    Attributes:
        sent: the heartbeats, as they were sent.
        replies: the replies.
    """

    def __init__(self, registry, ask, rank=0, size=2):
        self.registry, self.ask, self.rank, self.size = registry, ask, rank, size
        self.changes = HeartbeatChanges()
        self.sent, self.replies = [], []

    def beat(self, *groups, attempts=3, lost=()):
        before = len(self.sent)
        beat = replace(self.ask.heartbeat(self.rank, self.size, *groups), lost=list(lost))
        for _ in range(attempts):
            self.sent.append(self.changes.reduced(beat))
            self.replies.append(self.registry.heartbeat(self.sent[-1]))
            if not self.changes.acknowledge(self.replies[-1]):
                break
        return self.sent[before:]


@pytest.fixture
def rank(registry, ask):
    return Rank(registry, ask)


def seqs(registry):
    return {info.id: info.seqs.get("0") for info in registry.groups()}


def test_only_changes_are_sent_after_the_first_heartbeat(rank, registry):
    (first,) = rank.beat(world(1), half(1))
    (second,) = rank.beat(world(2), half(1))
    (third,) = rank.beat(world(2), half(1))
    assert [group.id for group in first.groups] == ["world", "half"]
    assert [(group.id, group.ranks) for group in second.groups] == [("world", [])]
    assert third.groups == []
    assert seqs(registry) == {"world": 2, "half": 1}
    assert {info.id: info.ranks for info in registry.groups()} == {"world": [0, 1], "half": [0]}


def test_a_group_that_is_not_named_is_as_fresh_as_the_heartbeat(rank, registry, clock):
    rank.beat(world(1))
    clock.advance(5)
    rank.beat(world(1))
    assert registry.groups()[0].ages == {"0": 0.0}


def test_a_group_ends(rank, registry):
    rank.beat(world(1), half(1))
    (beat,) = rank.beat(world(1))
    assert beat.ended_groups == ["half"]
    assert seqs(registry) == {"world": 1}
    assert [event.kind for event in registry.events.since(0)][-1] == "group-ended"
    rank.beat(world(1), half(5))
    assert seqs(registry) == {"world": 1, "half": 5}


def test_a_gateway_that_was_restarted_gets_everything(rank, ask, clock):
    rank.beat(world(1), half(1))
    rank.registry = Registry(clock)
    first, second = rank.beat(world(2), half(1))
    assert (first.changes_since, len(first.groups)) == (1, 1)
    assert (second.changes_since, len(second.groups)) == (0, 2)
    assert seqs(rank.registry) == {"world": 2, "half": 1}
    assert [info.state for info in rank.registry.ranks()] == ["alive"]


def test_a_heartbeat_counts_although_its_changes_are_of_no_use(rank, registry, clock):
    rank.beat(world(1))
    clock.advance(2)
    reply = registry.heartbeat(replace(rank.sent[0], number=7, changes_since=6, lost=[]))
    assert reply.resend
    assert registry.ranks()[0].heartbeat_age == 0
    assert seqs(registry) == {"world": 1}


def test_a_delayed_heartbeat_changes_nothing(rank, registry):
    rank.beat(world(1), half(1))
    rank.beat(world(2))
    assert not registry.heartbeat(rank.sent[0]).resend
    assert seqs(registry) == {"world": 2}


def test_a_lost_reply_is_followed_by_a_complete_heartbeat(rank, registry):
    rank.beat(world(1))
    registry.heartbeat(rank.changes.reduced(rank.ask.heartbeat(0, 2, world(2), half(1))))
    rank.changes.forget()
    (beat,) = rank.beat(world(2))
    assert beat.changes_since == 0
    assert seqs(registry) == {"world": 2}


def test_the_ranks_of_a_large_group_come_from_its_first_member(registry, ask):
    ranks = [Rank(registry, ask, number, SIZE) for number in range(3)]
    for each in reversed(ranks):
        (beat,) = each.beat(world(1, size=SIZE))
        assert beat.groups[0].ranks == (list(range(SIZE)) if each is ranks[0] else [])
        assert len(registry.groups()) == (each is ranks[0])
    assert registry.groups()[0].seqs == {"0": 1, "1": 1, "2": 1}


def test_one_member_is_asked_where_the_first_one_is_silent(registry, ask, clock):
    ranks = [Rank(registry, ask, number, SIZE) for number in (1, 2, 3)]
    for each in ranks:
        assert len(each.beat(world(1, size=SIZE))) == 1
    clock.advance(2 * HEARTBEAT_SECONDS)
    assert [len(each.beat(world(2, size=SIZE))) for each in ranks] == [2, 1, 1]
    assert registry.groups()[0].ranks == list(range(SIZE))


def test_a_rank_with_too_many_groups_is_alive(rank, registry, clock):
    groups = [replace(half(1), id=f"{number:04}") for number in range(MAX_GROUPS + 1)]
    rank.beat(*groups)
    assert rank.replies[-1].dropped_groups == 1
    clock.advance(2.5)
    rank.beat(*groups)
    clock.advance(1)
    assert [info.state for info in registry.ranks()] == ["alive"]
    assert len(registry.groups()) == MAX_GROUPS


def test_failed_ranks_are_news_once(registry, ask):
    ranks = [Rank(registry, ask, number, 4) for number in range(4)]
    for each in ranks:
        each.beat()
    ranks[0].beat(lost=[LostRank(2, "closed")])
    ranks[1].beat(lost=[LostRank(3, "closed")])
    ranks[0].beat()
    assert ranks[0].replies[-1].failed == [3]
    ranks[0].beat()
    assert ranks[0].replies[-1].failed == []
    assert registry.heartbeat(ask.heartbeat(0, 4)).failed == [2, 3], (
        "all, for a rank that does not count its heartbeats"
    )


def test_a_lost_rank_is_reported_once_and_stays_lost(registry, ask, clock):
    ranks = [Rank(registry, ask, number, 3) for number in range(2)]
    for each in ranks:
        each.beat()
    registry.heartbeat(ask.heartbeat(2, 3))
    (first,) = ranks[0].beat(lost=[LostRank(2, "closed")])
    (second,) = ranks[0].beat(lost=[LostRank(2, "closed")])
    assert ([lost.rank for lost in first.lost], second.lost) == ([2], [])
    record = registry._jobs["job"].epochs[1].records[0]
    assert record.lost_peers == {2}
    registry.heartbeat(ask.heartbeat(0, 3))
    assert record.lost_peers == frozenset(), "a complete heartbeat names all"


def test_rates_of_a_group_that_rests(rank, registry, clock):
    rank.beat(world(0))
    clock.advance(1)
    rank.beat(world(10))
    assert registry.groups()[0].operations_rate == 10
    clock.advance(1)
    rank.beat(world(10))
    assert registry.groups()[0].operations_rate == 0
    clock.advance(1)
    rank.beat(world(15))
    assert registry.groups()[0].operations_rate == 5
