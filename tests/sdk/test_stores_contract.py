"""Arguments, errors and whole-store methods of every store; test_stores.py has the results of random calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.processes import wait_until

import rankmesh as dist


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


@pytest.fixture(params=["hash", "file", "tcp", "prefix/tcp"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def store(kind, request, tmp_path) -> Iterator[dist.Store]:
    """A store without keys."""
    if "tcp" in kind:
        table = request.getfixturevalue("master")._store.table
        table._values.clear()
        found = request.getfixturevalue("client")
    else:
        found = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    found.set_timeout(30)
    yield dist.PrefixStore("outer", found) if "prefix" in kind else found
    if "tcp" not in kind:
        found.close()


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


def raises_timeout(call: Callable[[], object], *named: str) -> None:
    """Check that the call waits for 0.05 s, and that its error names the keys."""
    began = time.monotonic()
    with pytest.raises(dist.errors.StoreTimeoutError, match=r"waited 0\.05 s") as caught:
        call()
    assert time.monotonic() - began < 15
    assert isinstance(caught.value, dist.DistStoreError)
    assert isinstance(caught.value, TimeoutError)
    assert all(name in str(caught.value) for name in named)


def test_texts_large_values_and_numbers(store):
    store.set("grüße".encode(), "grüße")  # bytes are a key if they are text
    assert store.get("grüße") == "grüße".encode()
    store.set("k", bytes(5 << 20))
    assert len(store.get("k")) == 5 << 20
    assert store.add("n", True) == 1
    with pytest.raises(dist.errors.NotANumberError, match="gr") as caught:
        store.add("grüße", 1)
    assert isinstance(caught.value, dist.DistStoreError)
    assert isinstance(caught.value, ValueError)


class TestTheStore:
    @pytest.mark.parametrize("timeout", [timedelta(seconds=0.05), 0.05])
    def test_the_timeout_of_a_call_and_of_the_store(self, store, timeout):
        store.set("there", "")
        raises_timeout(lambda: store.wait(["there", "missing", "too"], timeout), "missing", "too")
        store.set_timeout(timeout)
        assert store.timeout == timedelta(seconds=0.05)
        for call in (
            lambda: store.get("missing"),
            lambda: store.wait(["missing"]),
            lambda: store.multi_get(["missing"]),
        ):
            raises_timeout(call, "missing")
        with pytest.raises(dist.errors.StoreTimeoutError, match="waited 0 s"):
            store.wait(["missing"], timedelta(0))

    def test_a_clone_has_the_same_keys(self, store, kind):
        assert store.has_extended_api() is (kind != "file")
        store.set_timeout(11)
        clone = store.clone()
        assert type(clone) is type(store)
        assert clone.timeout == timedelta(seconds=11)
        store.set("k", "1")
        assert clone.add("k", 1) == 2
        while isinstance(clone, dist.PrefixStore):
            clone = clone.underlying_store
        for _ in range(2):
            clone.close()
        with pytest.raises(dist.DistStoreError, match="is closed"):
            clone.get("k")
        assert store.get("k") == b"2"

    def test_barrier(self, store, in_thread):
        first = in_thread(store.barrier, "meet", 3)
        second = in_thread(store.barrier, "meet", 3)
        wait_until(lambda: store.add("meet/num_members", 0) == 2, "two at the barrier")
        assert not first.done()
        assert not second.done()
        store.barrier("meet", 3)
        assert first.result(10) is second.result(10) is None
        raises_timeout(lambda: store.barrier("alone", 2, timedelta(seconds=0.05)))


WRONG = [
    (lambda store: store.set(1, "v"), TypeError, "key must be a str, got int"),
    (lambda store: store.get(None), TypeError, "key must be a str, got NoneType"),
    (lambda store: store.set("k", 1), TypeError, "value must be str or bytes, got int"),
    (lambda store: store.set("k", None), TypeError, "value must be str or bytes, got NoneType"),
    (lambda store: store.append("k", 1), TypeError, "value must be str or bytes"),
    (lambda store: store.compare_set("k", 1, "v"), TypeError, "value must be str or bytes"),
    (lambda store: store.add("k", 1.5), TypeError, "'float'"),
    (lambda store: store.add("k", "1"), TypeError, "'str'"),
    (lambda store: store.wait("k"), TypeError, "keys must be a list of str, got str"),
    (lambda store: store.check("k"), TypeError, "keys must be a list of str, got str"),
    (lambda store: store.multi_get("k"), TypeError, "keys must be a list of str, got str"),
    (lambda store: store.multi_set(["k"], "v"), TypeError, "values must be a list of str or bytes, got str"),
    (lambda store: store.multi_set(["k"], [1]), TypeError, "value must be str or bytes, got int"),
    (lambda store: store.multi_set(["a"], ["1", "2"]), ValueError, "1 keys and 2 values"),
    (lambda store: store.set(b"\xff", "v"), dist.errors.InvalidKeyError, "UTF-8"),
    (lambda store: store.wait([1]), TypeError, "key must be a str, got int"),
    (lambda store: store.wait(["k"], "1"), TypeError, "timeout must be a datetime.timedelta or seconds, got str"),
    (lambda store: store.wait(["k"], timedelta(seconds=-1)), ValueError, "must not be negative"),
    (lambda store: store.set_timeout(None), TypeError, "timeout must be a datetime.timedelta or seconds, got NoneType"),
    (lambda store: store.set_timeout(-1), ValueError, "must not be negative"),
    (lambda store: store.set_timeout(float("nan")), ValueError, "must not be negative"),
    (lambda store: store.set("k", bytes((64 << 20) + 1)), dist.errors.InvalidValueError, "64"),
    *(
        (call, dist.errors.InvalidKeyError, "the key")
        for key in ("\ud800", "k" * 8193)
        for call in (
            lambda store, key=key: store.set(key, "v"),
            lambda store, key=key: store.get(key),
            lambda store, key=key: store.wait(["k", key]),
        )
    ),
]


def test_wrong_calls_change_nothing(store, kind):
    for call, error, message in WRONG:
        with pytest.raises(error, match=message):
            call(store)
    if "prefix" not in kind:
        with pytest.raises(dist.errors.InvalidKeyError):
            store.set("", "v")
    assert store.list_keys() == []
    store.set("k", "v")
