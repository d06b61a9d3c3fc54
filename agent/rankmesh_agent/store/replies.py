"""Replies to requests that may come again."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

RETENTION_SECONDS = 60.0
"""Lifetime of a cached reply: longer than a client retries."""
MAX_REPLIES = 4096
MAX_REPLY_BYTES = 16 << 20
"""Maximum size of all cached replies together, besides the newest, which is cached whatever its size."""

K = TypeVar("K")
R = TypeVar("R")


def surplus(sizes: Iterable[tuple[K, int]], total: int) -> Iterator[K]:
    """Yield the replies to drop so that all together have MAX_REPLY_BYTES: large ones, the oldest first.

    A few large replies do not displace the small ones, which would not exceed the maximum without them.

    Args:
        sizes: each reply with its size, the oldest first.
        total: the sum of the sizes.
    """
    for key, size in sizes:
        if total <= MAX_REPLY_BYTES:
            return
        if size > MAX_REPLY_BYTES // MAX_REPLIES:
            total -= size
            yield key


class ReplyCache(Generic[K, R]):
    """Replies by the identity of their requests: the newest MAX_REPLIES of the last RETENTION_SECONDS.

    Large replies are dropped earlier, the oldest first, when all together have more than MAX_REPLY_BYTES.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[K, tuple[float, int, R]] = OrderedDict()
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
        self.expire(now)
        while len(self._entries) >= MAX_REPLIES:
            self.pop(next(iter(self._entries)))
        for large in list(surplus(((each, entry[1]) for each, entry in self._entries.items()), self._bytes)):
            self.pop(large)
        self._entries[key] = (now + RETENTION_SECONDS, size, reply)
        self._bytes += size

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
