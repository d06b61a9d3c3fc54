"""Preconditions of writes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rankmesh_agent.wire.errors import PreconditionFailedError


@dataclass(frozen=True)
class Condition:
    """The value that a key must have for a write to take place, as HTTP expresses it (RFC 9110, section 13).

    Attributes:
        if_match: If-Match: the value's ETag must be one of these; ``*`` matches any value. None for no condition.
        if_absent: If-None-Match: ``*``, the key must not have a value.
        if_none_match: If-None-Match: the value's ETag must not be one of these.
    """

    if_match: tuple[str, ...] | None = None
    if_absent: bool = False
    if_none_match: tuple[str, ...] = ()

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

    def headers(self) -> dict[str, str]:
        """Return the condition as request headers."""
        found = {} if self.if_match is None else {"If-Match": ", ".join(self.if_match)}
        none_match = "*" if self.if_absent else ", ".join(self.if_none_match)
        return found | {"If-None-Match": none_match} if none_match else found


ALWAYS = Condition()


def etag(value: bytes) -> str:
    """Return the entity tag of a value, quotes included: equal for equal values."""
    return f'"{hashlib.blake2b(value, digest_size=16).hexdigest()}"'
