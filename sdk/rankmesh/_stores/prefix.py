"""A store inside another one, told apart by a prefix of the keys."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rankmesh._stores.base import Store, Text, key_of, keys_of, pairs_of, timedelta_of, value_of
from rankmesh_agent.wire.errors import UnsupportedStoreError


class PrefixStore(Store):
    """Another store, with ``prefix + "/"`` before each key.

    Args:
        prefix: what to put before the keys.
        store: where the keys are: one of ours, one of torch's, or any object with the methods ``set``, ``get``, ``add``
            and ``wait``. A method that it lacks raises UnsupportedStoreError here; its own errors pass through.

    Raises:
        TypeError: ``prefix`` is not text, or ``store`` is not a store.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.PrefixStore
    """

    def __init__(self, prefix: str, store: Any) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {type(prefix).__qualname__}")
        if not all(callable(getattr(store, method, None)) for method in ("set", "get", "add", "wait")):
            raise TypeError(f"store must have the methods set, get, add and wait, got {type(store).__qualname__}")
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Any:
        """The store that this one is a part of."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The underlying store's timeout."""
        found: timedelta = getattr(self._store, "timeout", self._timeout)
        return found

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._call("set_timeout", timedelta_of(timeout))

    def set(self, key: str, value: Text) -> None:
        self._call("set", self._within(key), value_of(value))

    def get(self, key: str) -> bytes:
        return value_of(self._call("get", self._within(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", self._within(key), operator.index(amount)))

    def compare_set(self, key: str, expected_value: Text, desired_value: Text) -> bytes:
        expected, desired = value_of(expected_value), value_of(desired_value)
        return value_of(self._call("compare_set", self._within(key), expected, desired))

    def append(self, key: str, value: Text) -> None:
        self._call("append", self._within(key), value_of(value))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", self._within(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        within = [self._within(key) for key in keys_of(keys)]
        self._call("wait", within, *(() if timeout is None else (timedelta_of(timeout),)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", [self._within(key) for key in keys_of(keys)]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not hasattr(self._store, "multi_get"):
            return super().multi_get(keys)
        return list(map(value_of, self._call("multi_get", [self._within(key) for key in keys_of(keys)])))

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        pairs = pairs_of(keys, values)
        if hasattr(self._store, "multi_set"):
            self._call("multi_set", [self._within(key) for key, _ in pairs], [value for _, value in pairs])
        else:
            super().multi_set(keys, values)

    def num_keys(self) -> int:
        """Return how many keys are set in the underlying store, whatever their prefix, as torch's does."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        start = self._within("")
        return sorted(key.removeprefix(start) for key in self._call("list_keys") if key.startswith(start))

    def queue_push(self, key: str, value: Text) -> None:
        self._call("queue_push", self._within(key), value_of(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return value_of(self._call("queue_pop", self._within(key), block))

    def queue_len(self, key: str) -> int:
        return int(self._call("queue_len", self._within(key)))

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._call("clone"))

    def has_extended_api(self) -> bool:
        return hasattr(self._store, "has_extended_api") and bool(self._store.has_extended_api())

    def _within(self, key: str) -> str:
        return f"{self._prefix}/{key_of(key)}"

    def _call(self, method: str, *arguments: Any) -> Any:
        found = getattr(self._store, method, None)
        if found is None:
            raise UnsupportedStoreError(f"{self!r}: {type(self._store).__name__} has no {method}()")
        return found(*arguments)

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
