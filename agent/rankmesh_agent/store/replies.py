"""Replies to requests that may come again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from rankmesh_agent.wire.errors import IdempotencyKeyReusedError
from rankmesh_agent.wire.store_frames import Frame, RequestId

RETENTION_SECONDS = 330.0
"""Lifetime of a cached reply: longer than the default timeout of a client, which repeats its requests until then."""
MAX_REPLIES = 4096
MAX_REPLY_BYTES = 16 << 20
"""Maximum size of all cached replies together, besides the newest, which is cached whatever its size."""


class ReplyCache:
    """The newest reply under each name of a RequestId: MAX_REPLIES of the last RETENTION_SECONDS. For several threads.

    Large replies are dropped earlier, the oldest first, when all together have more than MAX_REPLY_BYTES. A few of them
    do not displace the small ones, which would not exceed the maximum without them.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, int, Frame]] = OrderedDict()  # with their times and numbers
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, request_id: RequestId) -> Frame | None:
        """Return the reply to a request; None if there is none.

        Raises:
            IdempotencyKeyReusedError: another command has the same Idempotency-Key.
        """
        _, number, reply = self._entries.get(request_id.name, (0.0, request_id.number, None))
        if request_id.keyed and number != request_id.number:
            raise IdempotencyKeyReusedError(
                "the Idempotency-Key belongs to another request; make a new one for each request"
            )
        return reply if number == request_id.number else None

    def add(self, request_id: RequestId, reply: Frame) -> None:
        """Cache the reply to a request, in the place of an earlier one of its name."""
        now = time.monotonic()
        with self._lock:
            self._remove(request_id.name)
            while self._entries:
                oldest, (at, _, _) = next(iter(self._entries.items()))
                if len(self._entries) < MAX_REPLIES and at + RETENTION_SECONDS > now:
                    break
                self._remove(oldest)
            if self._bytes > MAX_REPLY_BYTES:
                for name, (_, _, frame) in list(self._entries.items()):
                    if self._bytes > MAX_REPLY_BYTES and len(frame) > MAX_REPLY_BYTES // MAX_REPLIES:
                        self._remove(name)
            self._entries[request_id.name] = now, request_id.number, reply
            self._bytes += len(reply)

    def _remove(self, name: bytes) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= len(entry[2])
