"""Replies to requests that may come again."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

from rankmesh_agent.wire.store_frames import Frame, RequestId

RETENTION_SECONDS = 60.0
"""Lifetime of a cached reply: longer than a client retries."""
MAX_REPLIES = 4096
MAX_REPLY_BYTES = 16 << 20
"""Maximum size of all cached replies together, besides the newest, which is cached whatever its size."""


class ReplyCache:
    """The newest reply under each name of a RequestId: MAX_REPLIES of the last RETENTION_SECONDS.

    Large replies are dropped earlier, the oldest first, when all together have more than MAX_REPLY_BYTES. A few of them
    do not displace the small ones, which would not exceed the maximum without them.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, int, Frame]] = OrderedDict()  # with their times and numbers
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: bytes) -> tuple[int, Frame] | None:
        """Return the number of the latest request of a name, and the reply to it; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry[1:]

    def add(self, request_id: RequestId, reply: Frame) -> None:
        """Cache the reply to a request, in the place of an earlier one of its name."""
        self._remove(request_id.name)
        now = time.monotonic()
        self.expire(now)
        while len(self._entries) >= MAX_REPLIES:
            self._remove(next(iter(self._entries)))
        if self._bytes > MAX_REPLY_BYTES:
            for name, (_, _, frame) in list(self._entries.items()):
                if self._bytes > MAX_REPLY_BYTES and len(frame) > MAX_REPLY_BYTES // MAX_REPLIES:
                    self._remove(name)
        self._entries[request_id.name] = now + RETENTION_SECONDS, request_id.number, reply
        self._bytes += len(reply)

    def next_expiry(self) -> float:
        """Return when the oldest reply expires, by time.monotonic; infinity if there is none."""
        return next(iter(self._entries.values()))[0] if self._entries else math.inf

    def expire(self, now: float) -> None:
        """Remove the replies that have expired."""
        while self.next_expiry() <= now:
            self._remove(next(iter(self._entries)))

    def _remove(self, name: bytes) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= len(entry[2])
