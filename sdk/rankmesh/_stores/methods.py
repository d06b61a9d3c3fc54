"""The methods of a store as a table, which a new kind of store implements, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.store import commands
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire.errors import InvalidKeyError

T = TypeVar("T")
Text = str | bytes | bytearray | memoryview
"""Types of values; a store returns bytes."""
_LONGEST = 100 * 365 * 86400.0


def key_of(key: str | bytes) -> str:
    """Return a key as text."""
    if isinstance(key, str):
        return key
    if not isinstance(key, bytes):
        raise TypeError(f"key must be a str, got {type(key).__qualname__}")
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise InvalidKeyError(f"key {key[:32]!r} is not UTF-8") from None


def keys_of(keys: Sequence[str]) -> tuple[str, ...]:
    """Return several keys as text."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise TypeError(f"keys must be a list of str, got {type(keys).__qualname__}")
    try:
        "".join(keys)
    except TypeError:  # one is not text; checking each takes longer
        return tuple(map(key_of, keys))
    return tuple(keys)


def value_of(value: Text) -> bytes:
    """Return a value as bytes."""
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"value must be str or bytes, got {type(value).__qualname__}")
    return bytes(value)


def values_of(keys: tuple[str, ...], values: Sequence[Text]) -> list[bytes]:
    """Return the values for ``keys`` as bytes."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"values must be a list of str or bytes, got {type(values).__qualname__}")
    if len(keys) != len(values):
        raise ValueError(f"multi_set() got {len(keys)} keys and {len(values)} values")
    return list(map(value_of, values))


def timedelta_of(timeout: timedelta | float) -> timedelta:
    """Return a timeout, given as a timedelta or in seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | float | int):
        raise TypeError(f"timeout must be a datetime.timedelta or seconds, got {type(timeout).__qualname__}")
    seconds = seconds_of(timeout, 0.0)
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=min(seconds, _LONGEST))


class Method(Generic[T]):
    """One method of a store."""

    def __init__(self, name: str, command: Callable[..., Command[T]], result: Callable[[Any], T]) -> None:
        self.name = name
        self.command = command
        self.result = result
        self.waits = isinstance(command, type) and issubclass(command, Waiting)


def _nothing(_: Any) -> None:
    return None


def _multi_set(keys: tuple[str, ...], values: list[bytes]) -> commands.MultiSet:
    return commands.MultiSet(tuple(zip(keys, values, strict=True)))


SET = Method("set", commands.Set, _nothing)
GET = Method("get", commands.Get, value_of)
ADD = Method("add", commands.Add, int)
COMPARE_SET = Method("compare_set", commands.CompareSet, value_of)
APPEND = Method("append", commands.Append, _nothing)
DELETE_KEY = Method("delete_key", commands.Delete, bool)
WAIT = Method("wait", commands.Wait, _nothing)
CHECK = Method("check", commands.Check, bool)
MULTI_GET = Method("multi_get", commands.MultiGet, lambda found: list(map(value_of, found)))
MULTI_SET = Method("multi_set", _multi_set, _nothing)
NUM_KEYS = Method("num_keys", commands.Count, int)
LIST_KEYS: Method[list[str]] = Method("list_keys", commands.Keys, list)
QUEUE_PUSH = Method("queue_push", commands.QueuePush, _nothing)
QUEUE_POP = Method("queue_pop", commands.QueuePop, value_of)
QUEUE_LEN = Method("queue_len", commands.QueueLen, int)

METHODS: tuple[Method[Any], ...] = tuple(found for found in globals().values() if isinstance(found, Method))
