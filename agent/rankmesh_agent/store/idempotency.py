"""Cache of replies to requests that may come again."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Generic, TypeVar

RETENTION_SECONDS = 60.0
"""Lifetime of a cached reply: longer than a client retries."""
MAX_REPLIES = 4096

K = TypeVar("K")
R = TypeVar("R")


class ReplyCache(Generic[K, R]):
    """Replies by the identity of their requests: the newest MAX_REPLIES of the last RETENTION_SECONDS.

    Args:
        max_bytes: maximum of the sizes of all replies together.
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self._entries: OrderedDict[K, tuple[float, int, R]] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> R | None:
        """Return the reply to a request, None if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[2]

    def add(self, key: K, reply: R, size: int = 0) -> None:
        """Cache a reply of so many bytes, in the place of an earlier one."""
        self.pop(key)
        now = time.monotonic()
        self._entries[key] = (now + RETENTION_SECONDS, size, reply)
        self._bytes += size
        while len(self._entries) > MAX_REPLIES or self._bytes > self._max_bytes:
            self.pop(next(iter(self._entries)))
        self.expire(now)

    def pop(self, key: K) -> R | None:
        """Remove and return the reply to a request, None if there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._bytes -= entry[1]
        return entry[2]

    def next_expiry(self) -> float:
        """Return when the oldest reply expires, by time.monotonic; infinity if there is none."""
        return next(iter(self._entries.values()))[0] if self._entries else math.inf

    def expire(self, now: float) -> None:
        """Remove the replies that have expired."""
        while self.next_expiry() <= now:
            self.pop(next(iter(self._entries)))
