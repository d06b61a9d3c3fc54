"""Writing a value only if the key holds what it should."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rankmesh_agent.wire.errors import PreconditionFailedError


@dataclass(frozen=True)
class Condition:
    """What a key has to hold for a write to happen, as HTTP says it (RFC 9110, section 13).

    Attributes:
        tags: If-Match: the ETags of which the value's has to be one; ``*`` is any value's. None for no condition.
        absent: If-None-Match: ``*``, the key must not have a value.
        others: If-None-Match: the ETags of which the value's must be none.
    """

    tags: tuple[str, ...] | None = None
    absent: bool = False
    others: tuple[str, ...] = ()

    def check(self, key: str, value: bytes | None) -> None:
        """Raise PreconditionFailedError unless ``value``, None for none, is as it has to be."""
        if self.absent and value is not None:
            raise PreconditionFailedError(f"key {key!r} has a value already")
        if self.others and value is not None and etag(value) in self.others:
            raise PreconditionFailedError(f"key {key!r} has that very value, with ETag {etag(value)}")
        if self.tags is None:
            return
        if value is None:
            raise PreconditionFailedError(f"key {key!r} has no value")
        if "*" not in self.tags and etag(value) not in self.tags:
            raise PreconditionFailedError(f"key {key!r} has another value, with ETag {etag(value)}")

    def headers(self) -> dict[str, str]:
        """Return the condition as headers of a request."""
        found = {} if self.tags is None else {"If-Match": ", ".join(self.tags)}
        unwanted = "*" if self.absent else ", ".join(self.others)
        return found | {"If-None-Match": unwanted} if unwanted else found


ALWAYS = Condition()


def etag(value: bytes) -> str:
    """Return the entity tag of a value, quotes included: equal for equal values."""
    return f'"{hashlib.blake2b(value, digest_size=16).hexdigest()}"'
