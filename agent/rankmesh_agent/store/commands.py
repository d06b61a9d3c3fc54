"""The commands of a store: one class for each call."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Annotated

from msgspec import Meta

from rankmesh_agent.store.command import Command, Immediate, Seconds, T, Waiting, Write
from rankmesh_agent.store.keys import ALWAYS, MAX_KEYS, Condition, check_key, check_keys, check_values
from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import (
    DistStoreError,
    KeyNotFoundError,
    NotANumberError,
    QueueEmptyError,
    StoreTimeoutError,
)

_DIGITS = 19
_NUMBER = re.compile(rb"[+-]?[0-9]{1,%d}" % _DIGITS)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_NAMED = 10


# Fields that several of them have


class OneKey(Command[T], frozen=True):
    """A command with one key."""

    key: str

    def __post_init__(self) -> None:
        check_key(self.key)


class AwaitedKey(OneKey[T], Waiting[T], frozen=True):
    """A command that waits for one key."""

    seconds: Seconds = 0.0  # type: ignore[misc]  # a constant of other commands


class KeyAndValue(OneKey[T], frozen=True):
    """A command with a key and a value."""

    value: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.value)


class SeveralKeys(Command[T], frozen=True):
    """A command with several keys."""

    keys: Annotated[tuple[str, ...], Meta(max_length=MAX_KEYS)]

    def __post_init__(self) -> None:
        check_keys(self.keys)


class AwaitedKeys(SeveralKeys[T], Waiting[T], frozen=True):
    """A command that waits for several keys."""

    seconds: Seconds = 0.0  # type: ignore[misc]  # a constant of other commands

    def timeout_error(self, table: Table) -> DistStoreError:
        keys = dict.fromkeys(self.keys)
        missing = table.missing(keys) or list(keys)
        named = ", ".join(map(repr, missing[:_NAMED]))
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return StoreTimeoutError(f"{len(missing)} of {len(keys)} keys were not set in time: {named}{more}")


class Prefix(Command[T], frozen=True):
    """A command for the keys that begin with a prefix."""

    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix:
            check_key(self.prefix)


# Values, one key each


class Get(AwaitedKey[bytes], frozen=True, tag=1):
    """Return the value of a key, after waiting until it is set.

    Raises:
        KeyNotFoundError: the key was not set within ``seconds``.
    """

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.value(self.key)
        return None if value is None else (value,)

    def start(self, table: Table) -> Future[bytes]:
        return table.watch([self.key], lambda values: values[self.key])

    def timeout_error(self, table: Table) -> DistStoreError:
        return KeyNotFoundError(f"key {self.key!r} is not set")


class Set(KeyAndValue[None], Write[None], frozen=True, tag=2):
    """Store a value under a key, in the place of an earlier one."""

    condition: Condition = ALWAYS

    def plan(self, values: Values) -> tuple[None, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return None, {self.key: self.value}


class Delete(OneKey[bool], Write[bool], frozen=True, tag=3):
    """Remove a key's value; return whether there was one."""

    condition: Condition = ALWAYS

    def plan(self, values: Values) -> tuple[bool, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return (True, {self.key: None}) if self.key in values else (False, {})


class Add(OneKey[int], Write[int], frozen=True, tag=4):
    """Add to the number stored as decimal digits under a key, 0 if it is missing or empty; return the sum.

    Raises:
        NotANumberError: the value is not decimal digits, or the sum would not fit into 64 bits.
    """

    amount: int = 1

    def __post_init__(self) -> None:
        check_key(self.key)
        self._check(self.amount)

    def plan(self, values: Values) -> tuple[int, Changes]:
        value = values.get(self.key) or b"0"
        if not (value.isdigit() and len(value) <= _DIGITS) and not _NUMBER.fullmatch(value):
            raise NotANumberError(f"key {self.key!r} holds {value[:32]!r}, which is not a number in decimal digits")
        total = int(value) + self.amount
        self._check(total)
        return total, {self.key: b"%d" % total}

    def _check(self, number: int) -> None:
        if not _LEAST <= number <= _MOST:
            raise NotANumberError(f"the sum for key {self.key!r} does not fit into 64 bits")


class CompareSet(OneKey[bytes], Write[bytes], frozen=True, tag=5):
    """Store ``desired`` if the key holds ``expected``, or if it has no value and ``expected`` is empty.

    It returns the key's value afterwards, and ``expected`` if it still has no value.
    """

    expected: bytes
    desired: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.expected, self.desired)

    def plan(self, values: Values) -> tuple[bytes, Changes]:
        value = values.get(self.key)
        if self.expected == (value or b""):
            return self.desired, {self.key: self.desired}
        return self.expected if value is None else value, {}


class Append(KeyAndValue[None], Write[None], frozen=True, tag=6):
    """Append to the value of a key, which is empty if there is none.

    Raises:
        InvalidValueError: the result would exceed the maximum size of a value.
    """

    def plan(self, values: Values) -> tuple[None, Changes]:
        before = values.get(self.key, b"")
        check_values(before, self.value)
        return None, {self.key: before + self.value}


# Values, several keys at once


class MultiGet(AwaitedKeys[Annotated[list[bytes], Meta(max_length=MAX_KEYS)]], frozen=True, tag=7):
    """Return the values of several keys at one moment, in their order, after waiting until all of them are set.

    Raises:
        StoreTimeoutError: some were not set within ``seconds``; the message names them.
    """

    def try_execute(self, table: Table) -> tuple[list[bytes]] | None:
        values = table.values(self.keys)
        return None if values is None else (values,)

    def start(self, table: Table) -> Future[list[bytes]]:
        return table.watch(self.keys, lambda values: [values[key] for key in self.keys])


class MultiSet(Write[None], frozen=True, tag=8):
    """Store several values, pairs of key and value, in one step; the last one of a key counts."""

    values: Annotated[tuple[tuple[str, bytes], ...], Meta(max_length=MAX_KEYS)]

    def __post_init__(self) -> None:
        check_keys([key for key, _ in self.values])
        check_values(*(value for _, value in self.values))

    def plan(self, values: Values) -> tuple[None, Changes]:
        return None, dict(self.values)


class Wait(AwaitedKeys[None], frozen=True, tag=9):
    """Return when all of some keys have values at the same time.

    Raises:
        StoreTimeoutError: some had none within ``seconds``; the message names them.
    """

    def try_execute(self, table: Table) -> tuple[None] | None:
        return None if table.values(self.keys) is None else (None,)

    def start(self, table: Table) -> Future[None]:
        return table.watch(self.keys, lambda _: None)


class Check(SeveralKeys[bool], Immediate[bool], frozen=True, tag=10):
    """Return whether each of some keys has a value, or a queue that is not empty."""

    def apply(self, table: Table) -> bool:
        return table.has(self.keys)


class Keys(Prefix[list[str]], Immediate[list[str]], frozen=True, tag=11):
    """Return the keys of values that begin with ``prefix``, sorted."""

    def apply(self, table: Table) -> list[str]:
        return table.keys(self.prefix)


class Count(Prefix[int], Immediate[int], frozen=True, tag=12):
    """Return the number of keys with values that begin with ``prefix``."""

    def apply(self, table: Table) -> int:
        return table.count(self.prefix)


# Queues


class QueuePush(KeyAndValue[None], Immediate[None], frozen=True, tag=13):
    """Append a value to a queue."""

    writes = True

    def apply(self, table: Table) -> None:
        table.push(self.key, self.value)


class QueuePop(AwaitedKey[bytes], frozen=True, tag=14):
    """Remove and return the first value of a queue, after waiting for one. The longest-waiting call gets the next.

    Raises:
        QueueEmptyError: there was none within ``seconds``.
    """

    writes = True

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.pop_one(self.key)
        return None if value is None else (value,)

    def start(self, table: Table) -> Future[bytes]:
        return table.pop(self.key)

    def timeout_error(self, table: Table) -> DistStoreError:
        return QueueEmptyError(f"queue {self.key!r} is empty")

    def undo(self, table: Table, result: bytes) -> None:
        table.push(self.key, result, first=True)


class QueueLen(OneKey[int], Immediate[int], frozen=True, tag=15):
    """Return the number of values in a queue."""

    def apply(self, table: Table) -> int:
        return table.length(self.key)


COMMANDS = (
    *(Get, Set, Delete, Add, CompareSet, Append, MultiGet, MultiSet, Wait, Check, Keys, Count),
    *(QueuePush, QueuePop, QueueLen),
)
