"""The table: atomic changes, watches, queues, threads; test_stores.py has what the commands make of it."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from rankmesh_agent.store import idempotency
from rankmesh_agent.store.commands import Add, Delete, Set
from rankmesh_agent.store.idempotency import ReplyCache
from rankmesh_agent.store.table import Table


@pytest.fixture
def table() -> Table:
    return Table()


def in_threads(count, function):
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count), timeout=30.0))


def watch(table, *keys):
    return table.watch(keys, dict)


class TestChanges:
    def test_a_plan_sees_the_values_and_returns_the_changes(self, table):
        table.change(lambda values: (None, {"a": b"1", "b": b"2"}))
        seen = table.change(lambda values: (dict(values), {"a": None, "b": b"3"}))
        assert seen == {"a": b"1", "b": b"2"}
        assert table.change(lambda values: (dict(values), {})) == {"b": b"3"}

    def test_changes_that_are_not_persisted_are_not_made(self, table):
        persisted = []
        table.change(lambda _: (None, {"a": b"1"}), persisted.append)
        table.change(lambda _: (None, {}), persisted.append)
        assert persisted == [{"a": b"1"}]

        def fail(_):
            raise OSError

        with pytest.raises(OSError):  # noqa: PT011
            table.change(lambda _: (None, {"a": b"2", "b": b"2"}), fail)
        with pytest.raises(ZeroDivisionError):
            table.change(lambda _: (1 // 0, {"a": b"3"}))
        assert table.change(lambda values: (dict(values), {})) == {"a": b"1"}

    def test_threads_that_add(self, table):
        in_threads(16, lambda _: [Add("n").apply(table) for _ in range(200)])
        assert Add("n", 0).apply(table) == 3200


class TestWatch:
    @pytest.mark.parametrize("changes", [{"a": b"1", "b": None}, {"b": None, "a": b"1"}])
    def test_a_change_that_removes_a_key_does_not_complete_it(self, table, changes):
        Set("b", b"1").apply(table)
        future = watch(table, "a", "b")
        table.change(lambda _: (None, changes))
        assert not future.done()
        Set("b", b"2").apply(table)
        assert future.result(0) == {"a": b"1", "b": b"2"}
        assert table._watches == {}

    def test_the_values_are_those_of_that_moment(self, table):
        future = watch(table, "a")
        Set("a", b"1").apply(table)
        Delete("a").apply(table)
        assert future.result(0) == {"a": b"1"}

    def test_a_cancelled_one_is_removed(self, table):
        kept, dropped = watch(table, "a"), watch(table, "a", "b")
        assert dropped.cancel()
        assert set(table._watches) == {"a"}
        Set("a", b"1").apply(table)
        assert kept.done()
        assert table._watches == {}
        with pytest.raises(CancelledError):
            dropped.result(0)

    def test_a_callback_may_use_the_table(self, table):
        watch(table, "a").add_done_callback(lambda _: Set("b", b"2").apply(table))
        Set("a", b"1").apply(table)
        assert table.keys() == ["a", "b"]

    def test_threads_that_watch_set_and_cancel(self, table):
        keys = [str(index) for index in range(16)]
        met = threading.Barrier(16)

        def one(index):
            met.wait(10.0)
            future = watch(table, *keys)
            watch(table, *keys).cancel()
            Set(keys[index], b"%d" % index).apply(table)
            return future.result(10.0)

        assert in_threads(16, one) == [{key: key.encode() for key in keys}] * 16
        assert table._watches == {}


class TestQueues:
    def test_a_cancelled_pop_gets_nothing(self, table):
        cancelled, waiting = table.pop("q"), table.pop("q")
        assert cancelled.cancel()
        table.push("q", b"1")
        assert waiting.result(0) == b"1"
        assert table.pop("q").cancel()
        assert table._pending_pops == {}
        table.push("q", b"2")
        assert table.length("q") == 1

    def test_a_value_that_is_put_back_is_the_first_again(self, table):
        table.push("q", b"2")
        table.push("q", b"1", first=True)
        assert [table.pop("q").result(0) for _ in range(2)] == [b"1", b"2"]

    def test_threads_that_push_and_pop_lose_nothing(self, table):
        taken = []

        def one(index):
            for number in range(200):
                table.push("q", b"%d/%d" % (index, number))
                if not (future := table.pop("q")).cancel():
                    taken.append(future.result(10.0))

        in_threads(8, one)
        while not (future := table.pop("q")).cancel():
            taken.append(future.result(0))
        assert sorted(taken) == sorted(b"%d/%d" % (index, number) for index in range(8) for number in range(200))
        assert table._pending_pops == {}


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


def test_replies_are_kept_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_REPLIES", 3)
    replies = ReplyCache[int, str]()
    for number in range(5):
        replies.add(number, "reply")
    assert [replies.get(number) for number in range(5)] == [None, None, "reply", "reply", "reply"]


def test_large_replies_are_kept_to_a_size_and_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_REPLY_BYTES", 100 * idempotency.MAX_REPLIES)
    replies = ReplyCache[str, str]()
    replies.add("small", "reply", 100)
    for number in range(10):
        replies.add(f"large {number}", "reply", 50 * idempotency.MAX_REPLIES)
    replies.add("beyond the limit", "reply", 200 * idempotency.MAX_REPLIES)
    assert list(replies._entries) == ["small", "large 9", "beyond the limit"]
    replies.add("next", "reply", 1)
    assert list(replies._entries) == ["small", "next"]
