"""Limits of keys and values."""

from __future__ import annotations

import pytest

from rankmesh_agent.store.keys import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, check_key, check_keys, check_values
from rankmesh_agent.wire.errors import InvalidKeyError, InvalidValueError


@pytest.mark.parametrize("key", ["k", "a/b c", "/", "..", "é" * (MAX_KEY_BYTES // 2)])
def test_keys(key):
    check_key(key)


def test_several_keys_count_once():
    assert check_keys(["b", "a", "b"]) == ("b", "a")


def test_too_many_keys():
    with pytest.raises(InvalidKeyError, match=str(MAX_KEYS)):
        check_keys([*map(str, range(MAX_KEYS + 1))])


def test_values():
    check_values()
    check_values(b"", bytes(MAX_VALUE_BYTES))
    for values in ([bytes(MAX_VALUE_BYTES + 1)], [bytes(MAX_VALUE_BYTES), b"1"]):
        with pytest.raises(InvalidValueError, match=str(MAX_VALUE_BYTES)):
            check_values(*values)
