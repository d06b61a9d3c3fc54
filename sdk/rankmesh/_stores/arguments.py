"""Checks and conversions of the arguments of a store's methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.wire.errors import InvalidKeyError

Text = str | bytes | bytearray | memoryview
"""Types of values; a store returns bytes."""
_LONGEST = 100 * 365 * 86400.0


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
        TypeError: they are not a sequence of keys; a single text is not one, although Python treats it so.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a list of str, got {type(keys).__qualname__}")
    try:
        "".join(keys)
    except TypeError:  # one is not text; checking each takes longer
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


def values_of(keys: tuple[str, ...], values: Sequence[Text]) -> list[bytes]:
    """Return the values for ``keys`` as bytes.

    Raises:
        TypeError: they are not a sequence of values.
        ValueError: their number is not that of the keys.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"values must be a list of str or bytes, got {type(values).__qualname__}")
    if len(keys) != len(values):
        raise ValueError(f"multi_set() got {len(keys)} keys and {len(values)} values")
    return list(map(value_of, values))


def timedelta_of(timeout: timedelta | float) -> timedelta:
    """Return a timeout, given as a timedelta or in seconds.

    Raises:
        TypeError: it is neither.
        ValueError: it is negative or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | float | int):
        raise TypeError(f"timeout must be a datetime.timedelta or seconds, got {type(timeout).__qualname__}")
    seconds = seconds_of(timeout, 0.0)
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=min(seconds, _LONGEST))
