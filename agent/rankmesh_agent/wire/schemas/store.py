"""Bodies of the key-value store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rankmesh_agent.wire.fields import Base64, Body, Integer
from rankmesh_agent.wire.schemas.job import LONG_POLL_SECONDS

MAX_KEY_BYTES = 8192
"""Maximum bytes of a key of the store, in UTF-8: as of torch's TCPStore."""
KEY_SIZE = {"minLength": 1, "maxLength": MAX_KEY_BYTES}
StoreKey = Annotated[str, Meta(extra_json_schema=KEY_SIZE)]
"""A key of the store; the store itself checks it."""


@dataclass
class StoreAdd(Body):
    """Add ``amount`` to the integer stored, as decimal digits, under ``key``; a missing key or an empty value is 0."""

    key: StoreKey
    amount: int = 1


@dataclass
class StoreNumber:
    """The number after an addition."""

    value: Integer


@dataclass
class StoreWait(Body):
    """Wait until all ``keys`` exist, at most ``timeout`` seconds (cut to LONG_POLL_SECONDS)."""

    keys: list[StoreKey]
    timeout: float = LONG_POLL_SECONDS


@dataclass
class StoreHealth:
    """The health of a standalone store."""

    status: Literal["ok"]
    service: Literal["rankmesh-store"]
    version: str
    keys: Integer


@dataclass
class StoreKeys(Body):
    """Some keys of the store."""

    keys: list[StoreKey]


@dataclass
class StoreFound:
    """True if all the keys exist."""

    found: bool


@dataclass
class StoreCompareSet(Body):
    """Replace the value ``expected`` of ``key`` by ``desired``, in base64; an empty ``expected`` means no value."""

    key: StoreKey
    expected: Base64
    desired: Base64


@dataclass
class StoreValues(Body):
    """Values by key, in base64."""

    values: dict[StoreKey, Base64]


@dataclass
class StoreQueue(Body):
    """One of the store's queues, by its key."""

    key: StoreKey


@dataclass
class StorePop(Body):
    """Remove the first value of a queue, waiting at most ``timeout`` seconds for one (cut to LONG_POLL_SECONDS)."""

    key: StoreKey
    timeout: float = 0.0
