"""The table: numbers, watching, threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import InvalidKeyError, NotANumberError


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


class TestValues:
    def test_set_get_delete(self, table):
        assert table.get("k") is None
        table.set("k", b"\x00v")
        table.set("k", b"w")
        assert table.get("k") == b"w"
        assert table.delete("k")
        assert not table.delete("k")
        assert table.get("k") is None

    def test_keys_by_prefix(self, table):
        for key in ("b/2", "a", "b/1"):
            table.set(key, b"")
        assert table.keys() == ["a", "b/1", "b/2"]
        assert table.keys("b/") == ["b/1", "b/2"]

    def test_missing(self, table):
        table.set("a", b"")
        assert table.missing(["c", "a", "b"]) == ["c", "b"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda table: table.get(""),
            lambda table: table.set("", b""),
            lambda table: table.add("", 1),
            lambda table: table.delete(""),
            lambda table: table.watch([""]),
        ],
    )
    def test_no_call_takes_an_empty_key(self, table, call):
        with pytest.raises(InvalidKeyError):
            call(table)


class TestAdd:
    def test_a_missing_key_counts_as_0_and_digits_are_stored(self, table):
        assert table.add("n", 3) == 3
        assert table.add("n", -5) == -2
        assert table.get("n") == b"-2"

    @pytest.mark.parametrize("value", [b"41", b"+41", b"0041"])
    def test_digits_that_were_set(self, table, value):
        table.set("n", value)
        assert table.add("n", 1) == 42

    @pytest.mark.parametrize("value", [b"", b"x", b"1.5", b" 1", b"1_0", "\u0661".encode(), b"9" * 20])
    def test_not_a_number(self, table, value):
        table.set("n", value)
        with pytest.raises(NotANumberError, match="'n'"):
            table.add("n", 1)
        assert table.get("n") == value

    @pytest.mark.parametrize(("edge", "step"), [((1 << 63) - 1, 1), (-(1 << 63), -1)])
    def test_sums_stay_within_64_bits(self, table, edge, step):
        assert table.add("n", edge) == edge
        with pytest.raises(NotANumberError, match="64 bits"):
            table.add("n", step)
        assert table.add("n", 0) == edge

    def test_threads_that_add(self, table):
        in_threads(32, lambda _: [table.add("n", 1) for _ in range(200)])
        assert table.get("n") == b"6400"


class TestWatch:
    def test_keys_that_are_there(self, table):
        table.set("a", b"1")
        assert table.watch(["a", "a"]).result(0) == {"a": b"1"}
        assert table.watch([]).result(0) == {}
        assert table._watches == {}

    def test_it_completes_with_the_last_key(self, table):
        table.set("b", b"2")
        future = table.watch(["a", "b", "c"])
        table.set("a", b"1")
        assert not future.done()
        table.add("c", 3)
        assert future.result(0) == {"a": b"1", "b": b"2", "c": b"3"}
        assert table._watches == {}

    def test_all_keys_have_to_be_there_at_the_same_time(self, table):
        table.set("a", b"1")
        future = table.watch(["a", "b"])
        table.delete("a")
        table.set("b", b"2")
        assert not future.done()
        table.set("a", b"3")
        assert future.result(0) == {"a": b"3", "b": b"2"}

    def test_the_values_are_those_of_that_moment(self, table):
        future = table.watch(["a"])
        table.set("a", b"1")
        table.delete("a")
        assert future.result(0) == {"a": b"1"}

    def test_a_cancelled_watch_leaves_nothing_behind(self, table):
        kept, dropped = table.watch(["a"]), table.watch(["a", "b"])
        assert dropped.cancel()
        assert set(table._watches) == {"a"}
        table.set("a", b"1")
        assert kept.done()
        assert table._watches == {}
        with pytest.raises(CancelledError):
            dropped.result(0)

    def test_who_is_told_may_use_the_table(self, table):
        told = threading.Event()

        def note(_):
            table.set("b", b"2")
            told.set()

        table.watch(["a"]).add_done_callback(note)
        table.set("a", b"1")
        assert told.is_set()
        assert table.get("b") == b"2"

    def test_threads_that_watch_set_and_cancel(self, table):
        keys = [str(index) for index in range(16)]
        met = threading.Barrier(16)
        ends = []

        def one(index):
            met.wait(10.0)
            future = table.watch(keys)
            table.watch(keys).cancel()
            table.set(keys[index], b"%d" % index)
            ends.append(future.result(10.0))

        in_threads(16, one)
        assert ends == [{key: key.encode() for key in keys}] * 16
        assert table._watches == {}
