"""Limits of keys and values."""

from __future__ import annotations

from collections.abc import Collection

from rankmesh_agent.wire.errors import InvalidKeyError, InvalidValueError
from rankmesh_agent.wire.schemas import MAX_KEY_BYTES

MAX_KEYS = 65_536
"""Maximum number of keys in one call: one for each rank of the largest world."""
MAX_VALUE_BYTES = 64 << 20
"""Maximum size of a value, and of the values of one call together."""


def check_key(key: str) -> None:
    """Raise InvalidKeyError unless ``key`` is text of 1 to MAX_KEY_BYTES bytes."""
    if 0 < len(key) <= MAX_KEY_BYTES and key.isascii():
        return
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError("the key is not text: it has lone surrogates") from None
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidKeyError(f"the key has {size} bytes; keys are text of 1 to {MAX_KEY_BYTES} bytes")


def check_keys(keys: Collection[str]) -> None:
    """Raise InvalidKeyError if one of ``keys`` is invalid, or if they are more than MAX_KEYS."""
    if len(keys) > MAX_KEYS:
        raise InvalidKeyError(f"{len(keys)} keys in one call, at most {MAX_KEYS} are allowed; use several calls")
    text = "".join(keys)
    if not all(keys) or not text.isascii() or (len(text) > MAX_KEY_BYTES and max(map(len, keys)) > MAX_KEY_BYTES):
        for key in keys:  # one of them may be invalid; checking each takes longer
            check_key(key)


def check_values(*values: bytes) -> None:
    """Raise InvalidValueError if the values of one call exceed MAX_VALUE_BYTES together."""
    size = sum(map(len, values))
    if size > MAX_VALUE_BYTES:
        raise InvalidValueError(f"{size} bytes of values in one call, at most {MAX_VALUE_BYTES} are allowed")
