"""Commands on a table: conditions, prefixes, limits and errors; test_stores.py has the rest."""

from __future__ import annotations

import pytest

from rankmesh_agent.store.commands import (
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    MultiGet,
    MultiSet,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.keys import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, check_keys, check_values
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import (
    InvalidKeyError,
    InvalidValueError,
    KeyNotFoundError,
    NotANumberError,
    QueueEmptyError,
    StoreTimeoutError,
)


def test_timeout_errors_name_the_missing_keys():
    table = Table()
    Set("there", b"").apply(table)
    assert str(Get("k").timeout_error(table)) == "key 'k' is not set"
    assert isinstance(Get("k").timeout_error(table), KeyNotFoundError)
    assert isinstance(QueuePop("k").timeout_error(table), QueueEmptyError)
    for kind in (Wait, MultiGet):
        error = kind(("not", "there", "yet", "not")).timeout_error(table)
        assert isinstance(error, StoreTimeoutError)
        assert str(error).endswith("2 of 3 keys were not set in time: 'not', 'yet'")
    assert str(Wait(tuple(map(str, range(100)))).timeout_error(table)).endswith("'9' and 90 more")


def test_an_error_names_the_value_that_is_no_number():
    table = Table()
    Set("n", b"x" * 100).apply(table)
    with pytest.raises(NotANumberError, match=r"key 'n' holds b'x{32}',") as caught:
        Add("n").apply(table)
    assert isinstance(caught.value, ValueError)
    Set("n", b"").apply(table)
    assert Add("n", 0).apply(table) == 0
    with pytest.raises(NotANumberError, match="'n' does not fit into 64 bits"):
        Add("n", 1 << 63).apply(table)


def test_a_value_does_not_grow_beyond_the_limit():
    table = Table()
    Set("k", bytes(MAX_VALUE_BYTES)).apply(table)
    with pytest.raises(InvalidValueError, match=str(MAX_VALUE_BYTES)):
        Append("k", b"1").apply(table)


@pytest.mark.parametrize("key", ["", "k" * (MAX_KEY_BYTES + 1), "é" * (MAX_KEY_BYTES // 2 + 1), "\ud800"])
def test_invalid_keys(key):
    for make in (Get, Delete, Add, QueueLen, QueuePop, lambda key: Set(key, b""), lambda key: Append(key, b"")):
        with pytest.raises(InvalidKeyError):
            make(key)
    for make in (Wait, MultiGet, Check, lambda keys: MultiSet(tuple((key, b"") for key in keys))):
        with pytest.raises(InvalidKeyError):
            make(("good", key))
    for make in (lambda key: CompareSet(key, b"", b""), lambda key: QueuePush(key, b""), Keys, Count):
        if key or make not in (Keys, Count):
            with pytest.raises(InvalidKeyError):
                make(key)


def test_invalid_values():
    large = bytes(MAX_VALUE_BYTES + 1)
    for make in (Set, Append, QueuePush, lambda key, value: MultiSet(((key, value),))):
        with pytest.raises(InvalidValueError):
            make("k", large)
    with pytest.raises(InvalidValueError):
        CompareSet("k", large[1:], b"1")


def test_several_keys():
    check_keys(["b", "a", "b", "é" * (MAX_KEY_BYTES // 2)])
    with pytest.raises(InvalidKeyError, match=str(MAX_KEYS)):
        check_keys([*map(str, range(MAX_KEYS + 1))])


def test_values():
    check_values()
    check_values(b"", bytes(MAX_VALUE_BYTES))
    for values in ([bytes(MAX_VALUE_BYTES + 1)], [bytes(MAX_VALUE_BYTES), b"1"]):
        with pytest.raises(InvalidValueError, match=str(MAX_VALUE_BYTES)):
            check_values(*values)
