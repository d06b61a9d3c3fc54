"""The table: atomic changes, watches, queues, threads; test_stores.py has what the commands make of it."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.store import table as table_module
from rankmesh_agent.store.commands import Add, CompareSet, Delete, Get, MultiSet, QueuePop, QueuePush, Set
from rankmesh_agent.store.table import Changes, Quota, ReplyCache, Table
from rankmesh_agent.wire.errors import DistStoreError, IdempotencyKeyReusedError, NotANumberError, StoreFullError
from rankmesh_agent.wire.store_frames import RequestId


@pytest.fixture
def table() -> Table:
    return Table()


def watch(table, *keys):
    return table.watch(keys, dict)


class TestWatch:
    def test_a_callback_may_use_the_table(self, table):
        watch(table, "a").add_done_callback(lambda _: Set("b", b"2").apply(table))
        Set("a", b"1").apply(table)
        assert table.keys() == ["a", "b"]


def test_closing_cancels_all_waits(table):
    waiting = [watch(table, "a"), watch(table, "a", "b"), table.pop("q")]
    table.close()
    table.close()
    waiting += [watch(table, "a"), table.pop("q")]
    assert all(future.cancelled() for future in waiting)
    assert table._watches == {}
    assert table._pending_pops == {}
    Set("a", b"1").apply(table)
    assert watch(table, "a").result(0) == {"a": b"1"}


def test_a_value_passes_by_a_pop_that_was_cancelled_just_now(table) -> None:
    table._remove_pop = lambda key, pop: None  # type: ignore[method-assign]  # it waits for the lock that push has
    table.pop("queue").cancel()
    table.push("queue", b"value")
    assert table.pop_one("queue") == b"value"


class Log:
    """A TableLog that notes what a table had before each change, and may fail.

    Attributes:
        records: the calls, with the contents before the change.
        fails: whether it fails.
    """

    def __init__(self, table: Table) -> None:
        self.request_id: RequestId | None = None
        self.records: list[tuple[Any, ...]] = []
        self.fails = False
        self._table = table

    def _note(self, *call: Any) -> None:
        if self.fails:
            raise DistStoreError("the disk is full")
        values, queues = self._table.contents()
        self.records.append((*call, {**values}, {**queues}))

    def changed(self, changes: Changes, result: Any) -> None:
        self._note("changed", dict(changes), result)

    def pushed(self, key: str, value: bytes, *, first: bool) -> None:
        self._note("pushed", key, value, first)

    def popped(self, key: str, value: bytes, request_id: RequestId | None) -> None:
        self._note("popped", key, value, request_id)

    def handed_over(self, value: bytes, request_id: RequestId | None) -> None:
        self._note("handed over", value, request_id)


ONE, TWO = RequestId(b"one", 1), RequestId(b"two", 2)


class TestALog:
    @pytest.fixture
    def log(self, table) -> Log:
        table.fill({"k": b"1"}, {"q": [b"a", b"b"]})
        table.log = Log(table)
        return table.log

    @pytest.mark.parametrize(
        ("command", "record"),
        [
            (Set("k", b"2"), ("changed", {"k": b"2"}, None)),
            (Add("k", 4), ("changed", {"k": b"5"}, 5)),
            (Delete("k"), ("changed", {"k": None}, True)),
            (MultiSet((("a", b""), ("k", b"2"))), ("changed", {"a": b"", "k": b"2"}, None)),
            (QueuePush("q", b"c"), ("pushed", "q", b"c", False)),
            (QueuePush("new", b"c"), ("pushed", "new", b"c", False)),
            (QueuePop("q"), ("popped", "q", b"a", ONE)),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_it_has_each_change_before_the_table(self, table, log, command, record):
        """If it fails, so does the command, which changes nothing, nor what counts for the quota."""
        before, counted = table.contents(), (table._entries, table._bytes)
        log.request_id, log.fails = ONE, True
        with pytest.raises(DistStoreError, match="the disk is full"):
            command.try_execute(table)
        assert (table.contents(), table._entries, table._bytes) == (before, *counted)
        log.fails = False
        command.try_execute(table)
        assert log.records == [(*record, *before)]
        assert table.contents() != before

    def test_a_command_that_changes_nothing_is_not_in_it(self, table, log):
        for command in (Get("k"), CompareSet("k", b"0", b"2"), Delete("none"), QueuePop("none")):
            command.try_execute(table)
        with pytest.raises(NotANumberError):
            Add("k", 1 << 70).try_execute(table)
        assert log.records == []

    def test_a_value_for_a_pop_that_waits_is_handed_over(self, table, log):
        log.request_id = ONE
        waiting = table.pop("new")
        log.request_id = TWO
        table.push("new", b"v")
        assert log.records == [("handed over", b"v", ONE, *table.contents())]
        assert waiting.result(0) == b"v"

    def test_a_value_that_cannot_be_handed_over_is_nobodys(self, table, log):
        """Both commands fail, of who pushes and of who waits."""
        before, waiting = table.contents(), table.pop("new")
        log.fails = True
        with pytest.raises(DistStoreError, match="the disk is full"):
            table.push("new", b"v")
        assert isinstance(waiting.exception(0), DistStoreError)
        log.fails = False
        assert table.contents() == before
        assert table._pending_pops == {}

    def test_what_is_put_back_is_told_apart(self, table, log):
        table.push("q", b"0", first=True)
        assert log.records[0][:4] == ("pushed", "q", b"0", True)
        assert [table.pop_one("q") for _ in range(3)] == [b"0", b"a", b"b"]


def test_a_table_can_be_filled_and_its_contents_are_copies():
    table = Table(Quota(3, 5))
    table.fill({"k": b"1"}, {"q": [b"a"]})
    values, queues = table.contents()
    assert (values, queues) == ({"k": b"1"}, {"q": [b"a"]})
    table.push("q", b"")
    Set("k", b"2").apply(table)
    assert (values, queues) == ({"k": b"1"}, {"q": [b"a"]})
    with pytest.raises(StoreFullError, match="3 keys and queued values"):
        table.push("q", b"")
    Delete("k").apply(table)
    with pytest.raises(StoreFullError, match="limit of 5"):
        Set("k", b"123").apply(table)
    table.count_call("set")
    assert table.stats() == ({"set": 1}, 0)


def test_replies_are_kept_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_REPLIES", 3)
    kept = ReplyCache()
    for number in range(5):
        kept.add(RequestId(b"%d" % number, number), b"reply")
    found = [kept.find(RequestId(b"%d" % number, number)) for number in range(5)]
    assert found == [None, None, b"reply", b"reply", b"reply"]
    assert kept.find(RequestId(b"4", 5)) is None
    with pytest.raises(IdempotencyKeyReusedError):
        kept.find(RequestId(b"4", 5, keyed=True))
    monkeypatch.setattr(table_module, "RETENTION_SECONDS", 0.0)
    kept.add(RequestId(b"last", 1), b"reply")
    assert list(kept._entries) == [b"last"]


def test_large_replies_are_kept_to_a_size_and_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_REPLY_BYTES", 100 * table_module.MAX_REPLIES)
    kept = ReplyCache()

    def add(name: bytes, size: int) -> None:
        kept.add(RequestId(name, 1), bytes(size))

    add(b"small", 100)
    for number in range(10):
        add(b"large %d" % number, 50 * table_module.MAX_REPLIES)
    add(b"beyond the limit", 200 * table_module.MAX_REPLIES)
    assert list(kept._entries) == [b"small", b"large 9", b"beyond the limit"]
    add(b"next", 1)
    assert list(kept._entries) == [b"small", b"next"]
