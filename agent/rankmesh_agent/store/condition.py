"""Preconditions of writes."""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from rankmesh_agent.store.keys import MAX_KEYS
from rankmesh_agent.wire.errors import PreconditionFailedError

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
