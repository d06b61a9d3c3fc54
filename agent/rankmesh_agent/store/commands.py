"""What a store can be asked: one class a call."""

from __future__ import annotations

import base64
import binascii
import json
import re
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import cast
from urllib.parse import quote

from rankmesh_agent.store.command import Immediate, Request, Waiting, Write
from rankmesh_agent.store.condition import ALWAYS, Condition
from rankmesh_agent.store.keys import check_key, check_keys, check_values
from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import (
    DistStoreError,
    InvalidValueError,
    KeyNotFoundError,
    NotANumberError,
    QueueEmptyError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.schemas import (
    StoreAdd,
    StoreCompareSet,
    StoreKeys,
    StorePop,
    StoreQueue,
    StoreValues,
    StoreWait,
)

_DIGITS = 19
_NUMBER = re.compile(rb"[+-]?[0-9]{1,%d}" % _DIGITS)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_NAMED = 10
"""How many missing keys a message lists."""


# Values, one key each


@dataclass(frozen=True)
class Get(Waiting[bytes]):
    """Return the value of a key; wait for it if nobody has set it yet.

    Raises:
        KeyNotFoundError: the key was not set within ``seconds``.
    """

    key: str
    seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        check_key(self.key)

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.value(self.key)
        return None if value is None else (value,)

    def begin(self, table: Table) -> Future[bytes]:
        return table.watch([self.key], lambda values: values[self.key])

    def late(self, table: Table) -> DistStoreError:
        return KeyNotFoundError(f"nobody has set key {self.key!r}")

    def request(self) -> Request:
        return Request("GET", _path(self.key), {"wait": self.seconds})

    def result(self, answer: bytes) -> bytes:
        return answer


@dataclass(frozen=True)
class Set(Write[None]):
    """Store a value under a key, in the place of an earlier one.

    Raises:
        PreconditionFailedError: the key does not hold what ``condition`` says.
    """

    key: str
    value: bytes
    condition: Condition = ALWAYS

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.value)

    def plan(self, values: Values) -> tuple[None, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return None, {self.key: self.value}

    def request(self) -> Request:
        return Request("PUT", _path(self.key), headers=self.condition.headers(), content=self.value)

    def result(self, answer: bytes) -> None:
        return None


@dataclass(frozen=True)
class Delete(Write[bool]):
    """Remove a key's value; return whether there was one.

    Raises:
        PreconditionFailedError: the key does not hold what ``condition`` says.
    """

    key: str
    condition: Condition = ALWAYS

    def __post_init__(self) -> None:
        check_key(self.key)

    def plan(self, values: Values) -> tuple[bool, Changes]:
        self.condition.check(self.key, values.get(self.key))
        return (True, {self.key: None}) if self.key in values else (False, {})

    def request(self) -> Request:
        return Request("DELETE", _path(self.key), headers=self.condition.headers())

    def result(self, answer: bytes) -> bool:
        return True

    def refused(self, error: DistStoreError) -> bool:
        if isinstance(error, KeyNotFoundError):
            return False
        raise error


@dataclass(frozen=True)
class Add(Write[int]):
    """Add to the number stored as decimal digits under a key, 0 if there is none; return the sum.

    Raises:
        NotANumberError: the value is not decimal digits, or the sum would not fit into 64 bits.
    """

    key: str
    amount: int = 1

    def __post_init__(self) -> None:
        check_key(self.key)

    def plan(self, values: Values) -> tuple[int, Changes]:
        value = values.get(self.key, b"0")
        if not (value.isdigit() and len(value) <= _DIGITS) and not _NUMBER.fullmatch(value):
            raise NotANumberError(f"key {self.key!r} holds {value[:32]!r}, which is not a number in decimal digits")
        total = int(value) + self.amount
        if not _LEAST <= total <= _MOST:
            raise NotANumberError(f"the sum for key {self.key!r} does not fit into 64 bits")
        return total, {self.key: b"%d" % total}

    def request(self) -> Request:
        return Request("POST", "/v1/store/add", json=asdict(StoreAdd(self.key, self.amount)))

    def result(self, answer: bytes) -> int:
        return _number_in(answer)


@dataclass(frozen=True)
class CompareSet(Write[bytes]):
    """Store ``desired`` if the key holds ``expected``, or if it has no value and ``expected`` is empty.

    It returns what the key holds now, and ``expected`` if it still has no value.
    """

    key: str
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

    def request(self) -> Request:
        body = StoreCompareSet(self.key, to_base64(self.expected), to_base64(self.desired))
        return Request("POST", "/v1/store/compare_set", json=asdict(body))

    def result(self, answer: bytes) -> bytes:
        return answer


@dataclass(frozen=True)
class Append(Write[None]):
    """Append to the value of a key, which is empty if there is none.

    Raises:
        InvalidValueError: it would become larger than a value may be.
    """

    key: str
    value: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.value)

    def plan(self, values: Values) -> tuple[None, Changes]:
        before = values.get(self.key, b"")
        check_values(before, self.value)
        return None, {self.key: before + self.value}

    def request(self) -> Request:
        return Request("POST", "/v1/store/append", {"key": self.key}, content=self.value)

    def result(self, answer: bytes) -> None:
        return None


# Values, several keys at once


@dataclass(frozen=True)
class MultiGet(Waiting[list[bytes]]):
    """Return the values of several keys at one moment, in their order; wait until all of them are set.

    Raises:
        StoreTimeoutError: some were not within ``seconds``; the message names them.
    """

    keys: tuple[str, ...]
    seconds: float = field(default=0.0, compare=False)
    each: tuple[str, ...] = field(init=False, repr=False)
    """The keys, each once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "each", check_keys(self.keys))

    def try_execute(self, table: Table) -> tuple[list[bytes]] | None:
        values = table.values(self.keys)
        return None if values is None else (values,)

    def begin(self, table: Table) -> Future[list[bytes]]:
        return table.watch(self.each, lambda values: [values[key] for key in self.keys])

    def late(self, table: Table) -> DistStoreError:
        return _absence(table, self.each)

    def request(self) -> Request:
        return Request("POST", "/v1/store/multi_get", json=asdict(StoreWait(list(self.each), self.seconds)))

    def result(self, answer: bytes) -> list[bytes]:
        values = json.loads(answer)["values"]
        return [from_base64(values[key]) for key in self.keys]


@dataclass(frozen=True)
class MultiSet(Write[None]):
    """Store several values, pairs of key and value, in one step; the last one of a key counts."""

    values: tuple[tuple[str, bytes], ...]

    def __post_init__(self) -> None:
        check_keys([key for key, _ in self.values])
        check_values(*(value for _, value in self.values))

    def plan(self, values: Values) -> tuple[None, Changes]:
        return None, dict(self.values)

    def request(self) -> Request:
        body = StoreValues({key: to_base64(value) for key, value in self.values})
        return Request("POST", "/v1/store/multi_set", json=asdict(body))

    def result(self, answer: bytes) -> None:
        return None


@dataclass(frozen=True)
class Wait(Waiting[None]):
    """Return when all of some keys have values at the same time.

    Raises:
        StoreTimeoutError: some had not within ``seconds``; the message names them.
    """

    keys: tuple[str, ...]
    seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", check_keys(self.keys))

    def try_execute(self, table: Table) -> tuple[None] | None:
        return None if table.values(self.keys) is None else (None,)

    def begin(self, table: Table) -> Future[None]:
        return table.watch(self.keys, lambda _: None)

    def late(self, table: Table) -> DistStoreError:
        return _absence(table, self.keys)

    def request(self) -> Request:
        return Request("POST", "/v1/store/wait", json=asdict(StoreWait(list(self.keys), self.seconds)))

    def result(self, answer: bytes) -> None:
        return None


@dataclass(frozen=True)
class Check(Immediate[bool]):
    """Return whether all of some keys have a value, or a queue with something in it."""

    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", check_keys(self.keys))

    def apply(self, table: Table) -> bool:
        return table.has(self.keys)

    def request(self) -> Request:
        return Request("POST", "/v1/store/check", json=asdict(StoreKeys(list(self.keys))))

    def result(self, answer: bytes) -> bool:
        return cast(bool, json.loads(answer)["found"])


@dataclass(frozen=True)
class Keys(Immediate[list[str]]):
    """Return the keys of values that begin with ``prefix``, sorted."""

    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix:
            check_key(self.prefix)

    def apply(self, table: Table) -> list[str]:
        return table.keys(self.prefix)

    def request(self) -> Request:
        return Request("GET", "/v1/store", {"prefix": self.prefix})

    def result(self, answer: bytes) -> list[str]:
        return cast(list[str], json.loads(answer))


@dataclass(frozen=True)
class Count(Immediate[int]):
    """Return how many keys that begin with ``prefix`` have values."""

    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix:
            check_key(self.prefix)

    def apply(self, table: Table) -> int:
        return table.count(self.prefix)

    def request(self) -> Request:
        return Request("POST", "/v1/store/count", {"prefix": self.prefix})

    def result(self, answer: bytes) -> int:
        return _number_in(answer)


# Queues


@dataclass(frozen=True)
class QueuePush(Immediate[None]):
    """Append a value to a queue."""

    writes = True
    key: str
    value: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        check_values(self.value)

    def apply(self, table: Table) -> None:
        table.push(self.key, self.value)

    def request(self) -> Request:
        return Request("POST", "/v1/store/queue_push", {"key": self.key}, content=self.value)

    def result(self, answer: bytes) -> None:
        return None


@dataclass(frozen=True)
class QueuePop(Waiting[bytes]):
    """Take the first value out of a queue; wait for one if it is empty. Who has waited longest gets the next.

    Raises:
        QueueEmptyError: there was none within ``seconds``.
    """

    writes = True
    key: str
    seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        check_key(self.key)

    def try_execute(self, table: Table) -> tuple[bytes] | None:
        value = table.pop_one(self.key)
        return None if value is None else (value,)

    def begin(self, table: Table) -> Future[bytes]:
        return table.pop(self.key)

    def late(self, table: Table) -> DistStoreError:
        return QueueEmptyError(f"queue {self.key!r} is empty")

    def undo(self, table: Table, result: bytes) -> None:
        table.push(self.key, result, first=True)

    def request(self) -> Request:
        return Request("POST", "/v1/store/queue_pop", json=asdict(StorePop(self.key, self.seconds)))

    def result(self, answer: bytes) -> bytes:
        return answer


@dataclass(frozen=True)
class QueueLen(Immediate[int]):
    """Return how many values are in a queue."""

    key: str

    def __post_init__(self) -> None:
        check_key(self.key)

    def apply(self, table: Table) -> int:
        return table.length(self.key)

    def request(self) -> Request:
        return Request("POST", "/v1/store/queue_len", json=asdict(StoreQueue(self.key)))

    def result(self, answer: bytes) -> int:
        return _number_in(answer)


# How things look on the wire


def to_base64(value: bytes) -> str:
    """Return a value as it stands in JSON."""
    return base64.b64encode(value).decode()


def from_base64(text: str) -> bytes:
    """Return the value that stands in JSON as ``text``.

    Raises:
        InvalidValueError: it is not base64, or too large.
    """
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValueError(f"{text[:32]!r} is not a value in base64") from None
    check_values(value)
    return value


def _path(key: str) -> str:
    # Dots too: clients resolve the path segments '.' and '..', which are good keys.
    return "/v1/store/" + quote(key, safe="").replace(".", "%2E")


def _number_in(answer: bytes) -> int:
    return cast(int, json.loads(answer)["value"])


def _absence(table: Table, keys: tuple[str, ...]) -> StoreTimeoutError:
    missing = table.missing(keys) or list(keys)
    named = ", ".join(map(repr, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return StoreTimeoutError(f"{len(missing)} of {len(keys)} keys were not set in time: {named}{more}")
