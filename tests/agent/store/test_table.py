"""The table: changes, watching, queues, threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from rankmesh_agent.store.commands import Add, Delete, Set
from rankmesh_agent.store.table import Table


@pytest.fixture
def table() -> Table:
    return Table()


def in_threads(count, function):
    threads = [threading.Thread(target=function, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)


def watch(table, *keys):
    return table.watch(keys, dict)


class TestChanges:
    def test_a_plan_sees_the_values_and_says_what_changes(self, table):
        table.change(lambda values: (None, {"a": b"1", "b": b"2"}))
        seen = table.change(lambda values: (dict(values), {"a": None, "b": b"3"}))
        assert seen == {"a": b"1", "b": b"2"}
        assert table.change(lambda values: (dict(values), {})) == {"b": b"3"}

    def test_who_keeps_the_changes_is_told_first_and_may_refuse_them(self, table):
        kept = []
        table.change(lambda _: (None, {"a": b"1"}), kept.append)
        table.change(lambda _: (None, {}), kept.append)
        assert kept == [{"a": b"1"}]

        def refuse(_):
            raise OSError

        with pytest.raises(OSError):  # noqa: PT011
            table.change(lambda _: (None, {"a": b"2", "b": b"2"}), refuse)
        assert table.change(lambda values: (dict(values), {})) == {"a": b"1"}

    def test_a_plan_that_fails_changes_nothing(self, table):
        with pytest.raises(ZeroDivisionError):
            table.change(lambda _: (1 // 0, {"a": b"1"}))
        assert table.count() == 0

    def test_keys_by_prefix(self, table):
        for key in ("b/2", "a", "b/1"):
            Set(key, b"").apply(table)
        assert table.keys() == ["a", "b/1", "b/2"]
        assert table.keys("b/") == ["b/1", "b/2"]
        assert table.count() == 3

    def test_missing(self, table):
        Set("a", b"").apply(table)
        assert table.missing(["c", "a", "b"]) == ["c", "b"]

    def test_threads_that_add(self, table):
        in_threads(32, lambda _: [Add("n").apply(table) for _ in range(200)])
        assert Add("n", 0).apply(table) == 6400


class TestWatch:
    def test_keys_that_are_there(self, table):
        Set("a", b"1").apply(table)
        assert watch(table, "a", "a").result(0) == {"a": b"1"}
        assert watch(table).result(0) == {}
        assert table._watches == {}

    def test_it_completes_with_the_last_key(self, table):
        Set("b", b"2").apply(table)
        future = watch(table, "a", "b", "c")
        Set("a", b"1").apply(table)
        assert not future.done()
        Add("c", 3).apply(table)
        assert future.result(0) == {"a": b"1", "b": b"2", "c": b"3"}
        assert table._watches == {}

    def test_all_keys_have_to_be_there_at_the_same_time(self, table):
        Set("a", b"1").apply(table)
        future = watch(table, "a", "b")
        Delete("a").apply(table)
        Set("b", b"2").apply(table)
        assert not future.done()
        Set("a", b"3").apply(table)
        assert future.result(0) == {"a": b"3", "b": b"2"}

    def test_the_values_are_those_of_that_moment(self, table):
        future = watch(table, "a")
        Set("a", b"1").apply(table)
        Delete("a").apply(table)
        assert future.result(0) == {"a": b"1"}

    def test_a_cancelled_watch_leaves_nothing_behind(self, table):
        kept, dropped = watch(table, "a"), watch(table, "a", "b")
        assert dropped.cancel()
        assert set(table._watches) == {"a"}
        Set("a", b"1").apply(table)
        assert kept.done()
        assert table._watches == {}
        with pytest.raises(CancelledError):
            dropped.result(0)

    def test_who_is_told_may_use_the_table(self, table):
        told = threading.Event()

        def note(_):
            Set("b", b"2").apply(table)
            told.set()

        watch(table, "a").add_done_callback(note)
        Set("a", b"1").apply(table)
        assert told.is_set()
        assert table.keys() == ["a", "b"]

    def test_threads_that_watch_set_and_cancel(self, table):
        keys = [str(index) for index in range(16)]
        met = threading.Barrier(16)
        ends = []

        def one(index):
            met.wait(10.0)
            future = watch(table, *keys)
            watch(table, *keys).cancel()
            Set(keys[index], b"%d" % index).apply(table)
            ends.append(future.result(10.0))

        in_threads(16, one)
        assert ends == [{key: key.encode() for key in keys}] * 16
        assert table._watches == {}


class TestQueues:
    def test_first_in_first_out(self, table):
        for value in (b"1", b"2", b"3"):
            table.push("q", value)
        assert table.length("q") == 3
        assert [table.pop("q").result(0) for _ in range(3)] == [b"1", b"2", b"3"]
        assert table.length("q") == 0
        assert table._queues == {}

    def test_who_has_waited_longest_gets_the_next(self, table):
        first, second = table.pop("q"), table.pop("q")
        table.push("q", b"1")
        assert first.result(0) == b"1"
        assert not second.done()
        table.push("q", b"2")
        assert second.result(0) == b"2"
        assert table._pending_pops == {}
        assert table._queues == {}

    def test_who_has_stopped_waiting_gets_nothing(self, table):
        gone, there = table.pop("q"), table.pop("q")
        assert gone.cancel()
        table.push("q", b"1")
        assert there.result(0) == b"1"
        last = table.pop("q")
        assert last.cancel()
        assert table._pending_pops == {}
        table.push("q", b"2")
        assert table.length("q") == 1

    def test_a_value_put_back_is_the_next_again(self, table):
        table.push("q", b"2")
        table.push("q", b"1", first=True)
        assert table.pop("q").result(0) == b"1"

    def test_a_queue_is_not_a_value(self, table):
        table.push("q", b"1")
        assert table.has(["q"])
        assert table.count() == 0
        assert not Delete("q").apply(table)
        waiting = watch(table, "q")
        Set("q", b"v").apply(table)
        assert waiting.result(0) == {"q": b"v"}
        assert table.length("q") == 1

    def test_threads_that_push_and_pop_lose_nothing(self, table):
        taken = []

        def one(index):
            for number in range(200):
                table.push("q", b"%d/%d" % (index, number))
                while not (future := table.pop("q")).cancel():
                    taken.append(future.result(10.0))
                    break

        in_threads(8, one)
        while not (future := table.pop("q")).cancel():
            taken.append(future.result(0))
        assert sorted(taken) == sorted(b"%d/%d" % (index, number) for index in range(8) for number in range(200))
        assert table._pending_pops == {}


def test_a_closed_table_sends_everyone_away(table):
    waiting = [watch(table, "a"), watch(table, "a", "b"), table.pop("q")]
    table.close()
    table.close()
    waiting += [watch(table, "a"), table.pop("q")]
    assert all(future.cancelled() for future in waiting)
    assert table._watches == {}
    assert table._pending_pops == {}
    Set("a", b"1").apply(table)
    assert watch(table, "a").result(0) == {"a": b"1"}
