"""Bodies of the key-value store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rankmesh_agent.wire.fields import Base64, Integer, Number, SchemaKeywords
from rankmesh_agent.wire.schemas.job import LONG_POLL_SECONDS

MAX_KEY_BYTES = 8192
"""Maximum bytes of a key of the store, in UTF-8: as of torch's TCPStore."""
"""Header of a request to the store that another agent has forwarded: the agent answers it itself, or refuses it."""
StoreKey = Annotated[str, SchemaKeywords(minLength=1, maxLength=MAX_KEY_BYTES)]
"""A key of the store; the store itself checks it."""


@dataclass
class StoreAdd:
    """Add ``amount`` to the integer stored, as decimal digits, under ``key``; a missing key or an empty value is 0."""

    key: StoreKey
    amount: Integer = 1


@dataclass
class StoreNumber:
    """The number after an addition."""

    value: Integer


@dataclass
class StoreWait:
    """Wait until all ``keys`` exist, at most ``timeout`` seconds (cut to LONG_POLL_SECONDS)."""

    keys: list[StoreKey]
    timeout: Number = LONG_POLL_SECONDS


@dataclass
class StoreHealth:
    """The health of a standalone store."""

    status: Literal["ok"]
    service: Literal["rankmesh-store"]
    version: str
    keys: Integer


@dataclass
class StoreKeys:
    """Some keys of the store."""

    keys: list[StoreKey]


@dataclass
class StoreFound:
    """True if all the keys exist."""

    found: bool


@dataclass
class StoreCompareSet:
    """Replace the value ``expected`` of ``key`` by ``desired``, in base64; an empty ``expected`` means no value."""

    key: StoreKey
    expected: Base64
    desired: Base64


@dataclass
class StoreValues:
    """Values by key, in base64."""

    values: dict[StoreKey, Base64]


@dataclass
class StoreQueue:
    """One of the store's queues, by its key."""

    key: StoreKey


@dataclass
class StorePop:
    """Remove the first value of a queue, waiting at most ``timeout`` seconds for one (cut to LONG_POLL_SECONDS)."""

    key: StoreKey
    timeout: Number = 0.0
