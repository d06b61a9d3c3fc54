"""What every key-value store can do, or refuses to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.wire.errors import InvalidKeyError, UnsupportedStoreError

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""How long get and wait wait unless told otherwise."""

Text = str | bytes | bytearray | memoryview
"""What values may be given as; they come back as bytes."""


class Store:
    """Keys with values that several ranks or threads share: the base class of all stores.

    Keys are text of 1 to 1024 bytes of UTF-8, values are bytes; text given as a value is stored in UTF-8. A class of
    your own may be a store: override ``set``, ``get``, ``add``, ``wait`` and what else it can do; the rest raises
    UnsupportedStoreError, which is also a NotImplementedError.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store
    """

    _timeout = DEFAULT_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """How long calls wait unless they are told otherwise."""
        return self._timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long calls wait unless they are told otherwise.

        Args:
            timeout: timedelta or seconds.

        Raises:
            TypeError: it is neither.
            ValueError: it is negative.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.set_timeout
        """
        self._timeout = timedelta_of(timeout)

    # One key

    def set(self, key: str, value: Text) -> None:
        """Store ``value`` under ``key``, in the place of an earlier one.

        Raises:
            TypeError: the key is not text, or the value neither text nor bytes.
            InvalidKeyError: the key is empty or too long.
            InvalidValueError: the value is larger than 64 MiB.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.set
        """
        self._refuse("set")

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, after waiting until somebody has set it.

        Raises:
            StoreTimeoutError: nobody did before the store's timeout.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.get
        """
        self._refuse("get")

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key``, 0 if there is none, and return the sum.

        The number is stored as decimal digits: ``get`` returns them, and one that was ``set`` can be added to.

        Raises:
            NotANumberError: the key holds something else, or the sum would not fit into 64 bits; the value stays.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.add
        """
        self._refuse("add")

    def compare_set(self, key: str, expected_value: Text, desired_value: Text) -> bytes:
        """Store ``desired_value`` if ``key`` holds ``expected_value``, or is not set and that is empty.

        Returns:
            What the key holds afterwards: ``desired_value`` if it was stored, else the other value; if the key is not
            set, ``expected_value``.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.compare_set
        """
        self._refuse("compare_set")

    def append(self, key: str, value: Text) -> None:
        """Append ``value`` to the value of ``key``; set it if there is none.

        Source: torch.distributed.Store.append
        """
        self._refuse("append")

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; return whether it was there.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.delete_key
        """
        self._refuse("delete_key")

    # Several keys

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return when all ``keys`` are set.

        Args:
            keys: the keys.
            timeout: how long to wait at most, timedelta or seconds; the store's timeout by default.

        Raises:
            StoreTimeoutError: some were not set in time; names them.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.wait
        """
        self._refuse("wait")

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` are set; a queue with something in it counts.

        Source: torch.distributed.Store.check
        """
        self._refuse("check")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, after waiting until all are set.

        Raises:
            StoreTimeoutError: some were not before the store's timeout.

        Source: torch.distributed.Store.multi_get
        """
        return [self.get(key) for key in keys_of(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        """Store ``values[i]`` under ``keys[i]``.

        Raises:
            ValueError: there are more keys than values, or fewer.

        Source: torch.distributed.Store.multi_set
        """
        for key, value in pairs_of(keys, values):
            self.set(key, value)

    def num_keys(self) -> int:
        """Return how many keys are set, those included that a store keeps for itself.

        That is one for a FileStore, and for a TCPStore made with a world size, which counts its participants.

        Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.Store.num_keys
        """
        self._refuse("num_keys")

    def list_keys(self) -> list[str]:
        """Return the keys that are set, sorted, without those that a store keeps for itself.

        Source: torch.distributed.Store.list_keys
        """
        self._refuse("list_keys")

    # Queues

    def queue_push(self, key: str, value: Text) -> None:
        """Append ``value`` to the queue named ``key``, which has nothing to do with the key's value.

        Source: torch.distributed.Store.queue_push
        """
        self._refuse("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value out of the queue named ``key``. Who has waited longest gets the next one.

        Args:
            key: the queue.
            block: whether to wait for a value if there is none.

        Raises:
            QueueEmptyError: there is none, and ``block`` is False.
            StoreTimeoutError: none came before the store's timeout.

        Source: torch.distributed.Store.queue_pop
        """
        self._refuse("queue_pop")

    def queue_len(self, key: str) -> int:
        """Return how many values are in the queue named ``key``.

        Source: torch.distributed.Store.queue_len
        """
        self._refuse("queue_len")

    # All of it

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Return when ``world_size`` callers have called with the same ``key``, which can be used once.

        Raises:
            StoreTimeoutError: fewer came in time.

        Source: torch.distributed.Store.barrier
        """
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(f"{key}/last_member", "1")
        self.wait([f"{key}/last_member"], self.timeout if timeout is None else timeout)

    def clone(self) -> Store:
        """Return another store object with the same keys and timeout.

        Source: torch.distributed.Store.clone
        """
        self._refuse("clone")

    def has_extended_api(self) -> bool:
        """Return whether the store can append, set and get several keys in one step, and has queues.

        Source: torch.distributed.Store.has_extended_api
        """
        return False

    def _refuse(self, method: str) -> NoReturn:
        raise UnsupportedStoreError(f"{type(self).__name__} has no {method}()")


def key_of(key: str | bytes) -> str:
    """Return a key as text.

    Raises:
        TypeError: it is neither text nor bytes.
        InvalidKeyError: the bytes are not UTF-8.
    """
    if isinstance(key, str):
        return key
    if not isinstance(key, bytes):
        raise TypeError(f"key must be a str, got {type(key).__qualname__}")
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise InvalidKeyError(f"key {key[:32]!r} is not UTF-8") from None


def keys_of(keys: Sequence[str]) -> tuple[str, ...]:
    """Return several keys as text.

    Raises:
        TypeError: they are not a sequence of keys; a single text is none, though Python takes it for one.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a list of str, got {type(keys).__qualname__}")
    try:
        "".join(keys)
    except TypeError:  # one is not text; looking at each takes longer
        return tuple(map(key_of, keys))
    return tuple(keys)


def value_of(value: Text) -> bytes:
    """Return a value as bytes.

    Raises:
        TypeError: it is neither text nor bytes.
    """
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"value must be str or bytes, got {type(value).__qualname__}")
    return bytes(value)


def pairs_of(keys: Sequence[str], values: Sequence[Text]) -> list[tuple[str, bytes]]:
    """Return keys with their values.

    Raises:
        ValueError: they are not as many.
    """
    found = keys_of(keys)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"values must be a list of str or bytes, got {type(values).__qualname__}")
    if len(found) != len(values):
        raise ValueError(f"multi_set() got {len(found)} keys and {len(values)} values")
    return [(key, value_of(value)) for key, value in zip(found, values, strict=True)]


def timedelta_of(timeout: timedelta | float) -> timedelta:
    """Return a timeout, given as one or in seconds.

    Raises:
        TypeError: it is neither.
        ValueError: it is negative or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | float | int):
        raise TypeError(f"timeout must be a datetime.timedelta or seconds, got {type(timeout).__qualname__}")
    seconds = seconds_of(timeout, 0.0)
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=min(seconds, _LONGEST))


_LONGEST = 100 * 365 * 86400.0
