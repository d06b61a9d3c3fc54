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


def test_prefixes_of_a_store():
    inner = dist.HashStore()
    dist.PrefixStore("", inner).set("k", "v")
    middle = dist.PrefixStore("in", inner)
    outer = dist.PrefixStore("out", middle)
    outer.set("k", "v")
    assert inner.list_keys() == ["/k", "in/out/k"]
    assert outer.underlying_store is middle
    assert middle.underlying_store is inner
    assert repr(outer) == "PrefixStore('out', PrefixStore('in', HashStore()))"
    outer.set_timeout(0.05)
    assert outer.timeout == inner.timeout == timedelta(seconds=0.05)
    with pytest.raises(dist.errors.StoreTimeoutError, match=r"'in/out/missing'"):
        outer.get("missing")


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
        inner.values["p/k"] = "text"  # type: ignore[assignment]
        assert store.get("k") == b"text"
        with pytest.raises(KeyError, match="p/missing"):  # its own errors pass through
            store.get("missing")
        store.barrier("b", 1)

    def test_methods_that_it_lacks(self):
        store = dist.PrefixStore("p", Minimal())
        for method in sorted(EVERYTHING.keys() - {"set", "get", "add", "wait", "multi_get", "multi_set"}):
            with pytest.raises(dist.errors.UnsupportedStoreError, match=rf"Minimal has no {method}\(\)"):
                getattr(store, method)(*EVERYTHING[method])
        with pytest.raises(dist.errors.UnsupportedStoreError, match=r"Minimal has no set_timeout\(\)"):
            store.set_timeout(1)

    def test_not_a_store(self):
        for other in (None, object(), {}, "127.0.0.1"):
            with pytest.raises(TypeError, match="must have the methods set, get, add and wait"):
                dist.PrefixStore("p", other)
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

    def test_methods_that_are_not_overridden(self):
        assert {dist.DistStoreError, NotImplementedError} <= {*dist.errors.UnsupportedStoreError.__mro__}
        for method, arguments in EVERYTHING.items():
            with pytest.raises(dist.errors.UnsupportedStoreError, match=r"Store has no \w+\(\)"):
                getattr(dist.Store(), method)(*arguments)

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
