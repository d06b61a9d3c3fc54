"""The journal of a host, and how the ownership of a store moves: several ranks in one process, without agents."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from rankmesh_agent.store import codec, commands
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.journal import KEPT_BYTES, Journal
from rankmesh_agent.store.ownership import Ownership
from rankmesh_agent.store.records import RequestId, StoreState, encode, encode_one, snapshot
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.schemas import Member


class Ranks:
    """Four ranks of one host that share a store."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        members = {
            rank: Member(rank, secrets.token_hex(16), "host", "host", os.getpid(), [], "http://127.0.0.1:1")
            for rank in range(4)
        }
        self.tables = [Table() for _ in range(4)]

        def lost(*, certainly: bool = False) -> set[int]:
            return set(self.lost)

        self.ownerships = [Ownership(rank, members, "", self.tables[rank], lost) for rank in range(4)]
        for each in self.ownerships:
            each.start()

    def execute(self, rank: int, command: Command[Any], request_id: RequestId | None = None) -> Any:
        log = self.ownerships[rank].log
        assert log is not None
        log.request.request_id = request_id
        (result,) = command.try_execute(self.tables[rank]) or (None,)
        log.request.request_id = None
        return result

    def blocks(self) -> int:
        """Return the memory that the journal takes, in bytes."""
        journal = self.ownerships[0]._journal
        assert journal is not None
        return 512 * os.fstat(journal._fd).st_blocks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    before = len(os.listdir("/proc/self/fd"))
    found = Ranks()
    yield found
    for each in found.ownerships:
        each.leave()
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_rank_takes_over_what_those_before_it_have_written(ranks: Ranks) -> None:
    for rank in range(4):
        assert ranks.ownerships[rank].acquire()
        assert [each.owned for each in ranks.ownerships] == [other == rank for other in range(4)]
        assert ranks.execute(rank, commands.Add("sum", 1)) == rank + 1
        assert ranks.execute(rank, commands.Append("text", b"x")) is None
        ranks.execute(rank, commands.QueuePush("queue", b"%d" % rank))
        ranks.execute(rank, commands.MultiSet((("a", b"%d" % rank), (f"only {rank}", b""))))
        ranks.execute(rank, commands.Delete(f"only {rank - 1}"))
        ranks.execute(rank, commands.Set("large", bytes([rank]) * (5 << 20)))
        ranks.lost.add(rank)
    table = ranks.tables[3]
    values = {"sum": b"4", "text": b"xxxx", "a": b"3", "only 3": b"", "large": b"\3" * (5 << 20)}
    assert dict(zip(table.keys(), map(table.value, table.keys()), strict=True)) == values
    assert [ranks.execute(3, commands.QueuePop("queue")) for _ in range(4)] == [b"0", b"1", b"2", b"3"]


def test_only_the_next_rank_takes_over_and_only_once_the_owner_is_gone(ranks: Ranks) -> None:
    assert [each.acquire() for each in ranks.ownerships] == [True, False, False, False]
    assert [each.owner() for each in ranks.ownerships] == [0] * 4
    ranks.lost |= {0, 1}
    assert [each.acquire() for each in ranks.ownerships[1:]] == [False, True, False]
    assert [each.owner() for each in ranks.ownerships] == [2] * 4
    ranks.lost |= {2, 3}
    assert ranks.ownerships[3].owner() is None


def test_an_owner_that_leaves_need_not_be_lost(ranks: Ranks) -> None:
    ranks.execute(0, commands.Set("key", b"value"))
    ranks.ownerships[0].leave()
    assert not ranks.ownerships[0].acquire()
    assert ranks.ownerships[0].owner() == 1
    assert ranks.ownerships[1].acquire()
    assert ranks.tables[1].value("key") == b"value"


def test_an_owner_that_was_thought_dead_learns_it_before_it_responds(ranks: Ranks) -> None:
    """It was stopped, say; what it still writes is nobody's."""
    old, new = ranks.ownerships[:2]
    ranks.execute(0, commands.Set("key", b"before"))
    ranks.lost.add(0)
    assert new.acquire()
    ranks.lost.clear()
    for _ in range(3):
        ranks.execute(0, commands.Set("key", b"after"))
        ranks.execute(0, commands.Set("fills the journal", bytes(KEPT_BYTES)))
    assert not old.owned
    assert old.owner() == 1
    assert old.superseded()
    assert not old.superseded()
    ranks.execute(1, commands.Set("other", b"new"))
    ranks.lost.add(1)
    assert old.acquire(), "it may have the store again, with what its successor has"
    assert ranks.tables[0].value("key") == b"before"
    assert ranks.tables[0].value("other") == b"new"
    assert ranks.tables[0].value("fills the journal") is None


def test_a_successor_that_dies_before_it_serves_leaves_the_records(ranks: Ranks) -> None:
    ranks.execute(0, commands.Set("key", b"value"))
    journal = ranks.ownerships[1]._journal
    assert journal is not None
    claimed = journal.claim(journal.words[0])
    assert claimed is not None
    journal.other_half()
    journal.append(encode_one(1, "half", b"a snapshot"))
    ranks.lost |= {0, 1}
    assert ranks.ownerships[2].acquire()
    assert ranks.tables[2].value("key") == b"value"
    assert ranks.tables[2].value("half") is None


def test_a_record_that_was_not_completed_is_not_read(ranks: Ranks) -> None:
    ranks.execute(0, commands.Set("key", b"value"))
    journal = ranks.ownerships[0]._journal
    assert journal is not None
    os.pwrite(journal._fd, b"the owner is killed here", journal.end + 4)
    ranks.lost.add(0)
    assert ranks.ownerships[1].acquire()
    assert ranks.tables[1].keys() == ["key"]


def test_the_memory_is_bounded_and_the_state_outlives_snapshots(ranks: Ranks) -> None:
    for index in range(600):
        ranks.execute(0, commands.Set(f"key {index % 7}", b"%d" % index + bytes(100_000)))
        assert ranks.blocks() < 4 * KEPT_BYTES
    for _ in range(30_000):
        ranks.execute(0, commands.Add("sum"))
    ranks.lost.add(0)
    assert ranks.ownerships[1].acquire()
    assert ranks.tables[1].value("sum") == b"30000"
    assert ranks.tables[1].value("key 4") == b"599" + bytes(100_000)
    assert ranks.blocks() < 4 * KEPT_BYTES


def test_the_next_owner_knows_the_replies(ranks: Ranks) -> None:
    ranks.execute(0, commands.Add("sum", 5), RequestId(b"connection", 7))
    ranks.execute(0, commands.QueuePush("queue", b"taken"))
    ranks.execute(0, commands.QueuePop("queue"), RequestId(b"other", 1))
    for _ in range(3):  # replies are in snapshots, too
        ranks.execute(0, commands.Set("fills the journal", bytes(KEPT_BYTES)))
    ranks.lost.add(0)
    assert ranks.ownerships[1].acquire()
    log = ranks.ownerships[1].log
    assert log is not None
    found = log.reply(b"connection")
    assert found is not None
    assert found[0] == 7
    assert codec.decode_result(commands.Add("sum", 5), store_frames.decode_response(found[1]), found[1]) == 5
    other = log.reply(b"other")
    assert other is not None
    assert codec.decode_result(commands.QueuePop("queue"), store_frames.decode_response(other[1]), other[1]) == b"taken"


def test_a_value_that_returns_to_its_queue_was_never_taken(ranks: Ranks) -> None:
    ranks.execute(0, commands.QueuePush("queue", b"1"))
    request_id = RequestId(b"connection", 3)
    pop = commands.QueuePop("queue")
    value = ranks.execute(0, pop, request_id)
    log = ranks.ownerships[0].log
    assert log is not None
    log.request.request_id = request_id
    pop.undo(ranks.tables[0], value)
    log.request.request_id = None
    ranks.lost.add(0)
    assert ranks.ownerships[1].acquire()
    assert ranks.tables[1].length("queue") == 1
    taken_over = ranks.ownerships[1].log
    assert taken_over is not None
    assert taken_over.reply(b"connection") is None


def test_a_waiting_pop_is_recorded_as_its_own_request(ranks: Ranks) -> None:
    log = ranks.ownerships[0].log
    assert log is not None
    log.request.request_id = RequestId(b"waiter", 2)
    future = commands.QueuePop("queue", 60).start(ranks.tables[0])
    ranks.execute(0, commands.QueuePush("queue", b"1"), RequestId(b"pusher", 4))
    assert future.result(0) == b"1"
    ranks.lost.add(0)
    assert ranks.ownerships[1].acquire()
    assert ranks.tables[1].length("queue") == 0
    taken_over = ranks.ownerships[1].log
    assert taken_over is not None
    assert [taken_over.reply(each) is not None for each in (b"waiter", b"pusher")] == [True, True]


def test_records_and_snapshots_lead_to_the_same_state() -> None:
    state = StoreState()
    for parts in (
        encode(1, [("a", b"1"), ("grüße", b""), ("c", b"3")], RequestId(b"x", 1), b"reply"),
        encode(1, [("c", None)]),
        encode(2, [("q", b"1")]),
        encode(3, [("q", b"0")]),
        encode(4, [("q", None)], RequestId(b"y", 2), b"other"),
    ):
        state.apply(b"".join(parts))
    again = StoreState()
    for parts in snapshot(state.values, state.queues, state.replies):
        again.apply(b"".join(parts))
    assert vars(state) == vars(again)
    assert state.values == {"a": b"1", "grüße": b""}
    assert list(state.queues["q"]) == [b"1"]
    assert state.replies == {b"x": (1, b"reply"), b"y": (2, b"other")}
    assert encode_one(1, "a", b"1") == b"".join(encode(1, [("a", b"1")]))


def test_a_journal_of_another_name_is_not_opened() -> None:
    journal = Journal.create("one" * 10, 0)
    try:
        assert Journal.open(os.getpid(), "two" * 10, 1) is None
        assert Journal.open(0x7FFFFFFF, "one" * 10, 1) is None
    finally:
        journal.close()
        journal.close()
