"""A store inside another one, with a prefix before its keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from rankmesh._stores.base import Store
from rankmesh._stores.methods import MULTI_GET, MULTI_SET, Method, timedelta_of
from rankmesh_agent.wire.errors import UnsupportedStoreError

T = TypeVar("T")


class PrefixStore(Store):
    """Another store, with ``prefix + "/"`` before each key.

    Args:
        prefix: the text before the keys.
        store: the underlying store: one of RankMesh's, one of torch's, or any object with the methods ``set``, ``get``,
            ``add`` and ``wait``. A method that it lacks raises UnsupportedStoreError here; its own errors pass through.

    Raises:
        TypeError: ``prefix`` is not text, or ``store`` is not a store.
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
        """The store that holds the keys."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The underlying store's timeout."""
        found: timedelta = getattr(self._store, "timeout", self._timeout)
        return found

    def set_timeout(self, timeout: timedelta | float) -> None:
        limit = timedelta_of(timeout)
        if not hasattr(self._store, "set_timeout"):
            raise self._lacks("set_timeout")
        self._store.set_timeout(limit)

    def num_keys(self) -> int:
        """Return the number of keys in the underlying store, with any prefix, as torch's PrefixStore does."""
        return super().num_keys()

    def list_keys(self) -> list[str]:
        start = f"{self._prefix}/"
        return sorted(key.removeprefix(start) for key in super().list_keys() if key.startswith(start))

    def clone(self) -> PrefixStore:
        if not hasattr(self._store, "clone"):
            raise self._lacks("clone")
        return PrefixStore(self._prefix, self._store.clone())

    def has_extended_api(self) -> bool:
        return hasattr(self._store, "has_extended_api") and bool(self._store.has_extended_api())

    def _call(self, method: Method[T], *arguments: Any) -> T:
        call = getattr(self._store, method.name, None)
        if call is None:
            if method in (MULTI_GET, MULTI_SET):
                return super()._call(method, *arguments)
            raise self._lacks(method.name)
        if not arguments:
            return method.result(call())
        prefix, keys = self._prefix, arguments[0]
        prefixed = f"{prefix}/{keys}" if isinstance(keys, str) else [f"{prefix}/{key}" for key in keys]
        return method.result(call(prefixed, *arguments[1:]))

    def _lacks(self, method: str) -> UnsupportedStoreError:
        return UnsupportedStoreError(f"{self!r}: {type(self._store).__name__} has no {method}()")

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
