"""PrefixStore over stores that users write, and subclasses of Store."""

from __future__ import annotations

from datetime import timedelta

import pytest

import rankmesh as dist

EVERYTHING = {
    "set": ("k", "v"),
    "get": ("k",),
    "add": ("k", 1),
    "wait": (["k"],),
    "check": (["k"],),
    "compare_set": ("k", "a", "b"),
    "append": ("k", "v"),
    "multi_get": (["k"],),
    "multi_set": (["k"], ["v"]),
    "num_keys": (),
    "list_keys": (),
    "delete_key": ("k",),
    "queue_push": ("k", "v"),
    "queue_pop": ("k",),
    "queue_len": ("k",),
    "clone": (),
}


class Minimal:
    """A user's store with the four methods that are required."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[tuple] = []

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def wait(self, keys, *timeout):
        self.calls.append((keys, *timeout))


def test_a_slash_is_between_prefix_and_key():
    inner = dist.HashStore()
    dist.PrefixStore("p", inner).set("k", "v")
    dist.PrefixStore("", inner).set("k", "v")
    dist.PrefixStore("out", dist.PrefixStore("in", inner)).set("k", "v")
    assert inner.list_keys() == ["/k", "in/out/k", "p/k"]


def test_the_store_inside():
    inner = dist.HashStore()
    middle = dist.PrefixStore("in", inner)
    outer = dist.PrefixStore("out", middle)
    assert outer.underlying_store is middle
    assert outer.underlying_store.underlying_store is inner
    assert repr(outer) == "PrefixStore('out', PrefixStore('in', HashStore()))"


def test_the_timeout_is_the_inner_stores():
    inner = dist.HashStore()
    store = dist.PrefixStore("p", inner)
    store.set_timeout(0.05)
    assert store.timeout == inner.timeout == timedelta(seconds=0.05)
    with pytest.raises(dist.StoreTimeoutError, match=r"'p/k'"):
        store.get("k")


class TestAUsersStore:
    def test_four_methods_suffice(self):
        inner = Minimal()
        store = dist.PrefixStore("p", inner)
        store.set("k", "v")
        assert inner.values == {"p/k": b"v"}
        assert store.get("k") == b"v"
        assert store.add("n", 2) == 2
        store.wait(["k"])
        store.wait(["k", "n"], 1.5)
        assert inner.calls == [(["p/k"],), (["p/k", "p/n"], timedelta(seconds=1.5))]
        store.multi_set(["a"], ["1"])
        assert store.multi_get(["a", "k"]) == [b"1", b"v"]
        assert store.has_extended_api() is False
        assert store.timeout == timedelta(seconds=300)

    def test_text_that_it_returns_becomes_bytes(self):
        inner = Minimal()
        inner.values["p/k"] = "text"  # type: ignore[assignment]
        assert dist.PrefixStore("p", inner).get("k") == b"text"

    def test_methods_that_it_lacks(self):
        store = dist.PrefixStore("p", Minimal())
        for method in sorted(EVERYTHING.keys() - {"set", "get", "add", "wait", "multi_get", "multi_set"}):
            with pytest.raises(dist.UnsupportedStoreError, match=rf"Minimal has no {method}\(\)"):
                getattr(store, method)(*EVERYTHING[method])
        with pytest.raises(dist.UnsupportedStoreError, match=r"Minimal has no set_timeout\(\)"):
            store.set_timeout(1)

    def test_its_own_errors_pass_through(self):
        with pytest.raises(KeyError, match="p/missing"):
            dist.PrefixStore("p", Minimal()).get("missing")

    def test_barrier_needs_no_more(self):
        dist.PrefixStore("p", Minimal()).barrier("b", 1)

    @pytest.mark.parametrize("other", [None, object(), {}, "127.0.0.1"])
    def test_not_a_store(self, other):
        with pytest.raises(TypeError, match="must have the methods set, get, add and wait"):
            dist.PrefixStore("p", other)

    def test_not_a_prefix(self):
        with pytest.raises(TypeError, match="prefix must be a str, got int"):
            dist.PrefixStore(1, dist.HashStore())  # type: ignore[arg-type]


class TestSubclassesOfStore:
    class Mine(dist.Store):
        """Overrides two methods, and does not call __init__ of Store."""

        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}

        def set(self, key, value):
            self.values[key] = value

        def get(self, key):
            return self.values[key]

    @pytest.mark.parametrize("method", EVERYTHING)
    def test_methods_that_are_not_overridden(self, method):
        with pytest.raises(dist.UnsupportedStoreError, match=r"Store has no \w+\(\)") as caught:
            getattr(dist.Store(), method)(*EVERYTHING[method])
        assert isinstance(caught.value, dist.DistStoreError)
        assert isinstance(caught.value, NotImplementedError)

    def test_methods_that_use_overridden_ones(self):
        store = self.Mine()
        store.multi_set(["a", "b"], ["1", "2"])
        assert store.multi_get(["b", "a"]) == [b"2", b"1"]
        assert dist.PrefixStore("p", store).underlying_store is store

    def test_timeout(self):
        store = self.Mine()
        assert store.timeout == timedelta(seconds=300)
        store.set_timeout(3)
        assert store.timeout == timedelta(seconds=3)
        assert self.Mine().timeout == timedelta(seconds=300)
        store.set_timeout(float("inf"))
        assert store.timeout > timedelta(days=365)
