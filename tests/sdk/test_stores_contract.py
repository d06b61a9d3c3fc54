"""What every store does, whatever holds its keys; where one of them refuses, it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.processes import wait_until

import rankmesh as dist

LONG = timedelta(seconds=30)
WITHOUT_DELETE_AND_QUEUES = ("file", "prefix/file")


@pytest.fixture(scope="module")
def master() -> Iterator[dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    yield store
    store.close()


@pytest.fixture(scope="module")
def client(master) -> Iterator[dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", master.port)
    yield store
    store.close()


def emptied(store: dist.TCPStore) -> dist.TCPStore:
    for key in store.list_keys():
        store.delete_key(key)
    for queue in ("q", "outer/q"):
        while store.queue_len(queue):
            store.queue_pop(queue)
    return store


def made(kind: str, path: Path, get: Callable[[str], dist.TCPStore]) -> dist.Store:
    match kind.split("/"):
        case ["prefix", *inner]:
            return dist.PrefixStore("outer", made("/".join(inner), path, get))
        case ["hash"]:
            return dist.HashStore()
        case ["file"]:
            return dist.FileStore(str(path / "store"), 1)
        case ["tcp master"]:
            return emptied(get("master"))
    emptied(get("master"))
    return get("client")


INNER = ("hash", "file", "tcp master", "tcp client")
KINDS = [*INNER, *(f"prefix/{kind}" for kind in INNER), "prefix/prefix/hash"]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def store(kind, request, tmp_path) -> Iterator[dist.Store]:
    found = made(kind, tmp_path, request.getfixturevalue)
    found.set_timeout(LONG)
    yield found
    while isinstance(found, dist.PrefixStore):
        found = found.underlying_store
    if "tcp" not in kind:
        found.close()


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


def raises_timeout(call: Callable[[], object], *named: str) -> None:
    """Check that the call waits in vain for 0.05 s, and says for what."""
    began = time.monotonic()
    with pytest.raises(dist.StoreTimeoutError, match=r"waited 0\.05 s") as caught:
        call()
    assert time.monotonic() - began < 15
    assert isinstance(caught.value, dist.DistStoreError)
    assert isinstance(caught.value, TimeoutError)
    assert all(name in str(caught.value) for name in named)


class TestOneKey:
    @pytest.mark.parametrize("value", ["", "text", "grüße", b"", b"\x00\xff", bytearray(b"array"), memoryview(b"view")])
    def test_what_is_set_comes_back_as_bytes(self, store, value):
        assert store.set("k", value) is None
        assert store.get("k") == (value.encode() if isinstance(value, str) else bytes(value))
        assert type(store.get("k")) is bytes

    def test_the_last_value_counts(self, store):
        store.set("k", "1")
        store.set("k", "2")
        assert store.get("k") == b"2"

    def test_a_large_value(self, store):
        store.set("k", bytes(5 << 20))
        assert len(store.get("k")) == 5 << 20

    @pytest.mark.parametrize("key", ["a/b", "..", "a b?c#d%2F", "grüße/世界", "\x00\n"])
    def test_any_text_is_a_key(self, store, key):
        store.set(key, "v")
        assert store.get(key) == b"v"
        assert store.list_keys() == [key]

    def test_bytes_are_a_key_if_they_are_text(self, store):
        store.set("grüße".encode(), "v")
        assert store.get("grüße") == b"v"
        with pytest.raises(dist.InvalidKeyError, match="UTF-8"):
            store.set(b"\xff", "v")

    def test_get_waits(self, store, in_thread):
        waiting = in_thread(store.get, "k")
        store.set("other", "x")
        store.set("k", "v")
        assert waiting.result(10) == b"v"

    def test_get_gives_up(self, store):
        store.set_timeout(timedelta(seconds=0.05))
        raises_timeout(lambda: store.get("missing"), "missing")

    def test_add(self, store):
        assert store.add("n", 1) == 1
        assert store.add("n", 6) == 7
        assert store.get("n") == b"7"
        assert store.add("n", -10) == -3
        assert store.get("n") == b"-3"
        assert store.add("n", True) == -2

    def test_add_to_digits_that_were_set(self, store):
        store.set("n", "41")
        assert store.add("n", 1) == 42

    def test_add_to_something_else(self, store):
        store.set("k", "text")
        with pytest.raises(dist.NotANumberError, match="text") as caught:
            store.add("k", 1)
        assert isinstance(caught.value, dist.DistStoreError)
        assert isinstance(caught.value, ValueError)
        assert store.get("k") == b"text"

    @pytest.mark.parametrize("amount", [1 << 63, -(1 << 63) - 1])
    def test_add_too_much(self, store, amount):
        with pytest.raises(dist.NotANumberError, match="64 bits"):
            store.add("n", amount)
        assert store.add("n", (1 << 63) - 1) == (1 << 63) - 1

    def test_compare_set(self, store):
        assert store.compare_set("k", "x", "1") == b"x"
        assert not store.check(["k"])
        assert store.compare_set("k", "", "1") == b"1"
        assert store.compare_set("k", "", "2") == b"1"
        assert store.compare_set("k", "x", "2") == b"1"
        assert store.compare_set("k", b"1", b"\xff") == b"\xff"
        assert store.get("k") == b"\xff"

    def test_append(self, store):
        store.append("k", "1")
        store.append("k", b"\xff")
        assert store.get("k") == b"1\xff"

    def test_delete_key(self, store, kind):
        store.set("k", "v")
        if kind in WITHOUT_DELETE_AND_QUEUES:
            with pytest.raises(dist.UnsupportedStoreError, match="FileStore has no delete_key") as caught:
                store.delete_key("k")
            assert isinstance(caught.value, NotImplementedError)
            assert store.get("k") == b"v"
        else:
            assert store.delete_key("k") is True
            assert store.delete_key("k") is False
            assert not store.check(["k"])


class TestSeveralKeys:
    def test_wait(self, store, in_thread):
        store.set("a", "")
        waiting = in_thread(store.wait, ["a", "b", "c"])
        store.set("b", "")
        assert not waiting.done()
        store.set("c", "")
        assert waiting.result(10) is None
        assert store.wait(["a", "b", "c", "a"], timedelta(0)) is None
        assert store.wait([]) is None

    @pytest.mark.parametrize("timeout", [timedelta(seconds=0.05), 0.05])
    def test_wait_gives_up_when_it_is_told_to(self, store, timeout):
        store.set("there", "")
        raises_timeout(lambda: store.wait(["there", "missing", "too"], timeout), "missing", "too")

    def test_wait_gives_up_at_the_stores_timeout(self, store):
        store.set_timeout(0.05)
        raises_timeout(lambda: store.wait(["missing"]), "missing")
        raises_timeout(lambda: store.multi_get(["missing"]), "missing")

    def test_no_time_at_all(self, store):
        with pytest.raises(dist.StoreTimeoutError, match="waited 0 s"):
            store.wait(["missing"], timedelta(0))

    def test_check(self, store):
        store.set("a", "")
        assert store.check(["a"]) is True
        assert store.check(["a", "missing"]) is False
        assert store.check([]) is True

    def test_multi(self, store):
        assert store.multi_set(["a", "b"], ["1", b"\xff"]) is None
        assert store.multi_get(["b", "a", "b"]) == [b"\xff", b"1", b"\xff"]
        assert store.multi_get([]) == []

    def test_multi_set_wants_as_many_values_as_keys(self, store):
        with pytest.raises(ValueError, match="1 keys and 2 values"):
            store.multi_set(["a"], ["1", "2"])
        assert store.list_keys() == []

    def test_multi_get_waits(self, store, in_thread):
        waiting = in_thread(store.multi_get, ["a", "b"])
        store.multi_set(["b", "a"], ["2", "1"])
        assert waiting.result(10) == [b"1", b"2"]

    def test_keys(self, store, kind):
        internal = 1 if "file" in kind else 0
        assert store.num_keys() == internal
        store.set("b", "")
        store.add("a/n", 1)
        store.append("c", "")
        assert store.num_keys() == internal + 3
        assert store.list_keys() == ["a/n", "b", "c"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_DELETE_AND_QUEUES])
class TestQueues:
    def test_first_in_first_out(self, store):
        for value in ("1", b"\xff", ""):
            assert store.queue_push("q", value) is None
        assert store.queue_len("q") == 3
        assert [store.queue_pop("q"), store.queue_pop("q", False), store.queue_pop("q", block=True)] == [
            b"1",
            b"\xff",
            b"",
        ]
        assert store.queue_len("q") == 0

    def test_pop_waits(self, store, in_thread):
        waiting = in_thread(store.queue_pop, "q")
        store.queue_push("q", "v")
        assert waiting.result(10) == b"v"

    def test_an_empty_queue(self, store):
        with pytest.raises(dist.QueueEmptyError, match=r"queue '(outer/)*q' is empty") as caught:
            store.queue_pop("q", block=False)
        assert isinstance(caught.value, dist.DistStoreError)
        store.set_timeout(0.05)
        raises_timeout(lambda: store.queue_pop("q"), "q")

    def test_a_queue_is_not_a_value(self, store):
        store.set("q", "v")
        store.queue_push("q", "first")
        assert store.get("q") == b"v"
        assert store.delete_key("q")
        assert store.queue_len("q") == 1
        assert store.check(["q"])
        assert store.list_keys() == []

    def test_each_value_is_taken_once(self, store, in_thread):
        taking = [in_thread(store.queue_pop, "q") for _ in range(12)]
        for number in range(12):
            store.queue_push("q", str(number))
        assert sorted(int(each.result(10)) for each in taking) == list(range(12))


class TestTheStore:
    def test_timeout(self, store):
        store.set_timeout(timedelta(seconds=7))
        assert store.timeout == timedelta(seconds=7)
        store.set_timeout(1.5)
        assert store.timeout == timedelta(seconds=1.5)

    def test_a_clone_has_the_same_keys(self, store):
        store.set_timeout(11)
        twin = store.clone()
        assert type(twin) is type(store)
        assert twin.timeout == timedelta(seconds=11)
        store.set("k", "1")
        assert twin.get("k") == b"1"
        assert twin.add("k", 1) == 2
        assert store.get("k") == b"2"
        while isinstance(twin, dist.PrefixStore):
            twin = twin.underlying_store
        twin.close()
        assert store.get("k") == b"2"

    def test_extended_api(self, store, kind):
        assert store.has_extended_api() is (kind not in WITHOUT_DELETE_AND_QUEUES)

    def test_barrier(self, store, in_thread):
        first = in_thread(store.barrier, "meet", 3)
        second = in_thread(store.barrier, "meet", 3)
        wait_until(lambda: store.add("meet/num_members", 0) == 2, "two at the barrier")
        assert not first.done()
        assert not second.done()
        store.barrier("meet", 3)
        assert first.result(10) is second.result(10) is None
        raises_timeout(lambda: store.barrier("alone", 2, timedelta(seconds=0.05)))

    def test_threads(self, store):
        def work(index: int) -> None:
            for _ in range(20):
                store.add("n", 1)
            store.set(f"done/{index}", str(index))
            store.wait([f"done/{other}" for other in range(8)])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert store.get("n") == b"160"
        assert store.multi_get([f"done/{index}" for index in range(8)]) == [b"%d" % index for index in range(8)]


class TestWrongArguments:
    """They are refused before anything happens, and the store is usable afterwards."""

    @pytest.fixture(autouse=True)
    def nothing_happened(self, store):
        yield
        assert store.list_keys() == []
        store.set("k", "v")

    @pytest.mark.parametrize(
        ("call", "what"),
        [
            (lambda store: store.set(1, "v"), "key must be a str, got int"),
            (lambda store: store.get(None), "key must be a str, got NoneType"),
            (lambda store: store.set("k", 1), "value must be str or bytes, got int"),
            (lambda store: store.set("k", None), "value must be str or bytes, got NoneType"),
            (lambda store: store.append("k", 1), "value must be str or bytes"),
            (lambda store: store.compare_set("k", 1, "v"), "value must be str or bytes"),
            (lambda store: store.add("k", 1.5), "'float'"),
            (lambda store: store.add("k", "1"), "'str'"),
            (lambda store: store.wait("k"), "keys must be a list of str, got str"),
            (lambda store: store.check("k"), "keys must be a list of str, got str"),
            (lambda store: store.multi_get("k"), "keys must be a list of str, got str"),
            (lambda store: store.multi_set(["k"], "v"), "values must be a list of str or bytes, got str"),
            (lambda store: store.multi_set(["k"], [1]), "value must be str or bytes, got int"),
            (lambda store: store.wait([1]), "key must be a str, got int"),
            (lambda store: store.wait(["k"], "1"), "timeout must be a datetime.timedelta or seconds, got str"),
            (lambda store: store.set_timeout(None), "timeout must be a datetime.timedelta or seconds, got NoneType"),
        ],
    )
    def test_types(self, store, call, what):
        with pytest.raises(TypeError, match=what):
            call(store)

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.wait(["k"], timedelta(seconds=-1)),
            lambda store: store.set_timeout(-1),
            lambda store: store.set_timeout(float("nan")),
        ],
    )
    def test_timeouts(self, store, call):
        with pytest.raises(ValueError, match="must not be negative"):
            call(store)

    def test_values_that_are_too_large(self, store):
        with pytest.raises(dist.InvalidValueError):
            store.set("k", bytes((64 << 20) + 1))

    def test_keys_that_are_none(self, store, kind):
        for key in ("\ud800", "k" * 1025, *([] if "prefix" in kind else [""])):
            for call in (lambda: store.set(key, "v"), lambda: store.get(key), lambda: store.wait(["k", key])):  # noqa: B023
                with pytest.raises(dist.InvalidKeyError):
                    call()


class TestWhatAFileStoreRefuses:
    @pytest.mark.parametrize("prefixed", [False, True])
    def test_queues(self, tmp_path, prefixed):
        inner = dist.FileStore(str(tmp_path / "store"), 1)
        store = dist.PrefixStore("p", inner) if prefixed else inner
        for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
            with pytest.raises(dist.UnsupportedStoreError, match="FileStore has no queue_") as caught:
                call()
            assert isinstance(caught.value, NotImplementedError)
        assert store.list_keys() == []
        inner.close()
