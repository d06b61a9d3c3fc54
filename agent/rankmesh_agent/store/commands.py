"""The commands of a store: one class for each call."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass, field

from rankmesh_agent.store.command import Immediate, Waiting, Write
from rankmesh_agent.store.condition import ALWAYS, Condition
from rankmesh_agent.store.keys import check_key, check_keys, check_values
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
"""Maximum number of missing keys in a message."""


@dataclass(frozen=True)
class _OneKey:
    key: str

    def __post_init__(self) -> None:
        check_key(self.key)


@dataclass(frozen=True)
class _KeyAndValue:
    key: str
    value: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.value)


@dataclass(frozen=True)
class _MultiKeyCommand:
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", check_keys(self.keys))


@dataclass(frozen=True)
class _Prefix:
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix:
            check_key(self.prefix)


# Values, one key each


@dataclass(frozen=True)
class Get(_OneKey, Waiting[bytes]):
    """Return the value of a key, after waiting until it is set.

    Raises:
        KeyNotFoundError: the key was not set within ``seconds``.
    """

    seconds: float = field(default=0.0, compare=False)

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.value(self.key)
        return None if value is None else (value,)

    def start(self, table: Table) -> Future[bytes]:
        return table.watch([self.key], lambda values: values[self.key])

    def timeout_error(self, table: Table) -> DistStoreError:
        return KeyNotFoundError(f"key {self.key!r} is not set")


@dataclass(frozen=True)
class Set(_KeyAndValue, Write[None]):
    """Store a value under a key, in the place of an earlier one.

    Raises:
        PreconditionFailedError: the key's value does not meet ``condition``.
    """

    condition: Condition = ALWAYS

    def plan(self, values: Values) -> tuple[None, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return None, {self.key: self.value}


@dataclass(frozen=True)
class Delete(_OneKey, Write[bool]):
    """Remove a key's value; return whether there was one.

    Raises:
        PreconditionFailedError: the key's value does not meet ``condition``.
    """

    condition: Condition = ALWAYS

    def plan(self, values: Values) -> tuple[bool, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return (True, {self.key: None}) if self.key in values else (False, {})


@dataclass(frozen=True)
class Add(_OneKey, Write[int]):
    """Add to the number stored as decimal digits under a key, 0 if it is missing or empty; return the sum.

    Raises:
        NotANumberError: the value is not decimal digits, or the sum would not fit into 64 bits.
    """

    amount: int = 1

    def plan(self, values: Values) -> tuple[int, Changes]:
        value = values.get(self.key) or b"0"
        if not (value.isdigit() and len(value) <= _DIGITS) and not _NUMBER.fullmatch(value):
            raise NotANumberError(f"key {self.key!r} holds {value[:32]!r}, which is not a number in decimal digits")
        total = int(value) + self.amount
        if not _LEAST <= total <= _MOST:
            raise NotANumberError(f"the sum for key {self.key!r} does not fit into 64 bits")
        return total, {self.key: b"%d" % total}


@dataclass(frozen=True)
class CompareSet(_OneKey, Write[bytes]):
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


@dataclass(frozen=True)
class Append(_KeyAndValue, Write[None]):
    """Append to the value of a key, which is empty if there is none.

    Raises:
        InvalidValueError: the result would exceed the maximum size of a value.
    """

    def plan(self, values: Values) -> tuple[None, Changes]:
        before = values.get(self.key, b"")
        check_values(before, self.value)
        return None, {self.key: before + self.value}


# Values, several keys at once


@dataclass(frozen=True)
class MultiGet(Waiting[list[bytes]]):
    """Return the values of several keys at one moment, in their order, after waiting until all of them are set.

    Raises:
        StoreTimeoutError: some were not set within ``seconds``; the message names them.
    """

    keys: tuple[str, ...]
    seconds: float = field(default=0.0, compare=False)
    unique: tuple[str, ...] = field(init=False, repr=False)
    """The keys without duplicates."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unique", check_keys(self.keys))

    def try_execute(self, table: Table) -> tuple[list[bytes]] | None:
        values = table.values(self.keys)
        return None if values is None else (values,)

    def start(self, table: Table) -> Future[list[bytes]]:
        return table.watch(self.unique, lambda values: [values[key] for key in self.keys])

    def timeout_error(self, table: Table) -> DistStoreError:
        return _missing_error(table, self.unique)


@dataclass(frozen=True)
class MultiSet(Write[None]):
    """Store several values, pairs of key and value, in one step; the last one of a key counts."""

    values: tuple[tuple[str, bytes], ...]

    def __post_init__(self) -> None:
        check_keys([key for key, _ in self.values])
        check_values(*(value for _, value in self.values))

    def plan(self, values: Values) -> tuple[None, Changes]:
        return None, dict(self.values)


@dataclass(frozen=True)
class Wait(_MultiKeyCommand, Waiting[None]):
    """Return when all of some keys have values at the same time.

    Raises:
        StoreTimeoutError: some had none within ``seconds``; the message names them.
    """

    seconds: float = field(default=0.0, compare=False)

    def try_execute(self, table: Table) -> tuple[None] | None:
        return None if table.values(self.keys) is None else (None,)

    def start(self, table: Table) -> Future[None]:
        return table.watch(self.keys, lambda _: None)

    def timeout_error(self, table: Table) -> DistStoreError:
        return _missing_error(table, self.keys)


@dataclass(frozen=True)
class Check(_MultiKeyCommand, Immediate[bool]):
    """Return whether each of some keys has a value, or a queue that is not empty."""

    def apply(self, table: Table) -> bool:
        return table.has(self.keys)


@dataclass(frozen=True)
class Keys(_Prefix, Immediate[list[str]]):
    """Return the keys of values that begin with ``prefix``, sorted."""

    def apply(self, table: Table) -> list[str]:
        return table.keys(self.prefix)


@dataclass(frozen=True)
class Count(_Prefix, Immediate[int]):
    """Return the number of keys with values that begin with ``prefix``."""

    def apply(self, table: Table) -> int:
        return table.count(self.prefix)


# Queues


@dataclass(frozen=True)
class QueuePush(_KeyAndValue, Immediate[None]):
    """Append a value to a queue."""

    writes = True

    def apply(self, table: Table) -> None:
        table.push(self.key, self.value)


@dataclass(frozen=True)
class QueuePop(_OneKey, Waiting[bytes]):
    """Remove and return the first value of a queue, after waiting for one. The longest-waiting call gets the next.

    Raises:
        QueueEmptyError: there was none within ``seconds``.
    """

    writes = True
    seconds: float = field(default=0.0, compare=False)

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.pop_one(self.key)
        return None if value is None else (value,)

    def start(self, table: Table) -> Future[bytes]:
        return table.pop(self.key)

    def timeout_error(self, table: Table) -> DistStoreError:
        return QueueEmptyError(f"queue {self.key!r} is empty")

    def undo(self, table: Table, result: bytes) -> None:
        table.push(self.key, result, first=True)


@dataclass(frozen=True)
class QueueLen(_OneKey, Immediate[int]):
    """Return the number of values in a queue."""

    def apply(self, table: Table) -> int:
        return table.length(self.key)


def _missing_error(table: Table, keys: tuple[str, ...]) -> StoreTimeoutError:
    missing = table.missing(keys) or list(keys)
    named = ", ".join(map(repr, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return StoreTimeoutError(f"{len(missing)} of {len(keys)} keys were not set in time: {named}{more}")
