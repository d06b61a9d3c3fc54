"""Base class of all key-value stores."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from rankmesh._stores import methods
from rankmesh._stores.methods import Method, Text, key_of, keys_of, timedelta_of, value_of, values_of
from rankmesh_agent.wire.errors import UnsupportedStoreError

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Default time limit of calls."""

T = TypeVar("T")


class Store:
    """Keys with values that several ranks or threads share: the base class of all stores.

    Keys are text of 1 to 8192 bytes of UTF-8, values are bytes; text given as a value is stored in UTF-8. To write a
    store of your own, override ``set``, ``get``, ``add``, ``wait`` and whichever other methods it supports; the rest
    raises UnsupportedStoreError, which is also a NotImplementedError.

    The timeout of a store is the time limit of each call, also of those that do not wait for keys (then at least 1 s):
    if the process that owns the keys does not respond for so long, the call raises StoreUnresponsiveError. If that
    process has ended, calls raise DistNetworkError at once.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store, and torch 2.13 for later methods
    """

    _timeout = DEFAULT_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """The default time limit of calls."""
        return self._timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the default time limit of calls.

        Args:
            timeout: timedelta or seconds.

        Raises:
            TypeError: it is neither.
            ValueError: it is negative.
        """
        self._timeout = timedelta_of(timeout)

    # One key

    def set(self, key: str, value: Text) -> None:
        """Store ``value`` under ``key``, in the place of an earlier one.

        Raises:
            TypeError: the key is not text, or the value neither text nor bytes.
            InvalidKeyError: the key is empty or too long.
            InvalidValueError: the value is larger than 64 MiB.
        """
        self._call(methods.SET, key_of(key), value_of(value))

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, after waiting until it is set.

        Raises:
            StoreTimeoutError: it was not set before the store's timeout.
        """
        return self._call(methods.GET, key_of(key))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key``, 0 if there is none, and return the sum.

        The number is stored as decimal digits: ``get`` returns them, and digits that were ``set`` can be added to.

        Raises:
            NotANumberError: the key holds something else, or the sum would not fit into 64 bits; the value stays.
        """
        return self._call(methods.ADD, key_of(key), int(operator.index(amount)))

    def compare_set(self, key: str, expected_value: Text, desired_value: Text) -> bytes:
        """Store ``desired_value`` if ``key`` holds ``expected_value``, or is not set and that is empty.

        Returns:
            The key's value afterwards: ``desired_value`` if it was stored, else the other value; if the key is not set,
            ``expected_value``.
        """
        return self._call(methods.COMPARE_SET, key_of(key), value_of(expected_value), value_of(desired_value))

    def append(self, key: str, value: Text) -> None:
        """Append ``value`` to the value of ``key``; set it if there is none."""
        self._call(methods.APPEND, key_of(key), value_of(value))

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        return self._call(methods.DELETE_KEY, key_of(key))

    # Several keys

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return when all ``keys`` are set.

        Args:
            keys: the keys.
            timeout: time limit, timedelta or seconds; the store's timeout by default.

        Raises:
            StoreTimeoutError: some were not set in time; names them.
        """
        limit = () if timeout is None else (timedelta_of(timeout),)
        self._call(methods.WAIT, keys_of(keys), *limit)

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` are set; a queue that is not empty counts."""
        return self._call(methods.CHECK, keys_of(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, after waiting until all are set.

        Raises:
            StoreTimeoutError: some were not set before the store's timeout.
        """
        return self._call(methods.MULTI_GET, keys_of(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        """Store ``values[i]`` under ``keys[i]``.

        Raises:
            ValueError: the numbers of keys and values differ.
        """
        found = keys_of(keys)
        self._call(methods.MULTI_SET, found, values_of(found, values))

    def num_keys(self) -> int:
        """Return the number of keys that are set, including internal ones.

        A FileStore has one of them, and so has a TCPStore made with a world size, which counts its participants.
        """
        return self._call(methods.NUM_KEYS)

    def list_keys(self) -> list[str]:
        """Return the keys that are set, sorted, without internal ones."""
        return self._call(methods.LIST_KEYS)

    # Queues

    def queue_push(self, key: str, value: Text) -> None:
        """Append ``value`` to the queue named ``key``, which is independent of the key's value."""
        self._call(methods.QUEUE_PUSH, key_of(key), value_of(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue named ``key``. The longest-waiting caller gets the next one.

        Args:
            key: the queue.
            block: whether to wait for a value if there is none.

        Raises:
            QueueEmptyError: there is none, and ``block`` is False.
            StoreTimeoutError: none came before the store's timeout.
        """
        return self._call(methods.QUEUE_POP, key_of(key), block)

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue named ``key``."""
        return self._call(methods.QUEUE_LEN, key_of(key))

    # The whole store

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Return when ``world_size`` callers have called with the same ``key``, which can be used once.

        Raises:
            StoreTimeoutError: fewer came in time.
        """
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(f"{key}/last_member", "1")
        self.wait([f"{key}/last_member"], self.timeout if timeout is None else timeout)

    def clone(self) -> Store:
        """Return another store object with the same keys and timeout."""
        raise self._unsupported_error("clone")

    def has_extended_api(self) -> bool:
        """Return whether the store can append, set and get several keys in one step, and has queues."""
        return False

    def _call(self, method: Method[T], *arguments: Any) -> T:
        """Carry out a method whose arguments are checked and converted."""
        if method is methods.MULTI_GET:
            return cast(T, [self.get(key) for key in arguments[0]])
        if method is methods.MULTI_SET:
            for key, value in zip(*arguments, strict=True):
                self.set(key, value)
            return cast(T, None)
        raise self._unsupported_error(method.name)

    def _unsupported_error(self, method: str) -> UnsupportedStoreError:
        return UnsupportedStoreError(f"{type(self).__name__} has no {method}()")
