"""What a key may be."""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh_agent.wire.errors import InvalidKeyError

MAX_KEY_BYTES = 1024
"""Longest key, in UTF-8."""
MAX_KEYS = 65_536
"""How many keys one call may wait for: one a rank of the largest world."""


def check_key(key: str) -> None:
    """Raise InvalidKeyError unless ``key`` is text of 1 to MAX_KEY_BYTES bytes."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError("the key is not text: it has lone surrogates") from None
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidKeyError(f"the key has {size} bytes; keys are text of 1 to {MAX_KEY_BYTES} bytes")


def check_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return ``keys``, each once, in the order given.

    Raises:
        InvalidKeyError: one of them is no key, or they are more than MAX_KEYS.
    """
    found = tuple(dict.fromkeys(keys))
    if len(found) > MAX_KEYS:
        raise InvalidKeyError(f"{len(found)} keys to wait for, at most {MAX_KEYS} are allowed; wait in several calls")
    for key in found:
        check_key(key)
    return found
