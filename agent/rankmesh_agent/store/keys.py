"""Limits of keys and values, and preconditions of writes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Annotated

from msgspec import Meta, Struct

from rankmesh_agent.wire.errors import InvalidKeyError, InvalidValueError, PreconditionFailedError
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


Tags = Annotated[tuple[str, ...], Meta(max_length=MAX_KEYS)]


class Condition(Struct, frozen=True, array_like=True):
    """The value that a key must have for a write to take place, as HTTP expresses it (RFC 9110, section 13).

    Attributes:
        if_match: If-Match: the value's ETag must be one of these; ``*`` matches any value. None for no condition.
        if_absent: If-None-Match: ``*``, the key must not have a value.
        if_none_match: If-None-Match: the value's ETag must not be one of these.
    """

    if_match: Tags | None = None
    if_absent: bool = False
    if_none_match: Tags = ()

    def check(self, key: str, value: bytes | None) -> None:
        """Raise PreconditionFailedError unless ``value``, None for none, meets the condition."""
        if self.if_absent and value is not None:
            raise PreconditionFailedError(f"key {key!r} has a value already")
        if self.if_none_match and value is not None and etag(value) in self.if_none_match:
            raise PreconditionFailedError(f"key {key!r} has that very value, with ETag {etag(value)}")
        if self.if_match is None:
            return
        if value is None:
            raise PreconditionFailedError(f"key {key!r} has no value")
        if "*" not in self.if_match and etag(value) not in self.if_match:
            raise PreconditionFailedError(f"key {key!r} has another value, with ETag {etag(value)}")


ALWAYS = Condition()


def etag(value: bytes) -> str:
    """Return the entity tag of a value, quotes included: equal for equal values."""
    return f'"{hashlib.blake2b(value, digest_size=16).hexdigest()}"'
