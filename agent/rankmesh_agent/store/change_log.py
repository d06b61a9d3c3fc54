"""Log of a table's changes in the journal of the owner's host."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankmesh_agent.store import codec, records
from rankmesh_agent.store.idempotency import MAX_REPLIES, RETENTION_SECONDS, surplus
from rankmesh_agent.store.journal import Journal
from rankmesh_agent.store.records import Pairs, Replies, RequestId
from rankmesh_agent.store.replication import Replicator
from rankmesh_agent.store.table import Changes, Table

_MIN_GARBAGE, _WARM_GARBAGE = 1 << 20, 6 << 20
"""Bytes of records after which the journal begins anew with a snapshot, as a minimum; and as a maximum, unless the last
snapshot has half as many: memory that the owner has just used is the fastest to write.
"""
_MAX_JOINED = 1 << 14
"""Largest record whose parts are joined before they are written."""


class _Request(threading.local):
    """The request that this thread executes."""

    request_id: RequestId | None = None


class ChangeLog:
    """Writes each change of a table to a journal, before the change is visible. Its methods need the table's lock.

    Args:
        journal: which this rank owns.
        table: the table.
        replies: the replies to requests that earlier owners executed, the oldest first.
        replicator: makes the replicator of a replica on another host, given a function that returns the present state;
            None if there is no other host.

    Attributes:
        replicator: see above.
        request: of the calling thread. A server sets its ``request_id`` to have the reply recorded.
    """

    def __init__(
        self,
        journal: Journal,
        table: Table,
        replies: Replies,
        replicator: Callable[[Callable[[], Iterator[list[bytes]]]], Replicator] | None = None,
    ) -> None:
        self.request = _Request()
        self._journal = journal
        self._append = journal.append
        self._table = table
        self._replies = replies
        self._written, self._limit = 0, math.inf  # bytes since the latest snapshot, and before the next
        self._inherited = dict(replies)
        self._inherited_until = time.monotonic() + RETENTION_SECONDS
        self.write_snapshot()
        self.replicator = None if replicator is None else replicator(self._snapshot)

    def reply(self, identity: bytes) -> tuple[int, bytes] | None:
        """Return the number and the response frame of the latest request of an identity that changed something."""
        return self._replies.get(identity)

    def inherited_reply(self, identity: bytes) -> tuple[int, bytes] | None:
        """Return the same, if an earlier owner executed the request, and not too long ago."""
        return self._inherited.get(identity) if time.monotonic() < self._inherited_until else None

    def changed(self, changes: Changes, result: Any) -> None:
        """Record new values, and the result of the command that sets them."""
        request_id = self.request.request_id
        if len(changes) == 1 and self.replicator is None:
            ((key, value),) = changes.items()
            if value is not None and len(value) <= _MAX_JOINED:
                if self._written > self._limit:
                    self.write_snapshot()
                reply = b"" if request_id is None else self._keep_reply(request_id, result)
                record = records.encode_one(records.SET, key, value, request_id, reply)
                self._written += len(record)
                self._append(record)
                return
        self._record(records.SET, changes.items(), request_id, result)

    def pushed(self, key: str, value: bytes, *, first: bool) -> None:
        """Record a value that goes to the end of a queue, or back to its head as if it had never been taken."""
        if first:
            self._record(records.PUSH_FIRST, [(key, value)], self.request.request_id, forget=True)
        else:
            self._record(records.PUSH, [(key, value)], self.request.request_id)

    def popped(self, key: str, value: bytes, request_id: RequestId | None) -> None:
        """Record that a request takes the first value of a queue."""
        self._record(records.POP, [(key, None)], request_id, value)

    def request_id(self) -> RequestId | None:
        """Return the request that this thread executes."""
        return self.request.request_id

    def write_snapshot(self) -> None:
        """Begin anew with records of the present state."""
        self._forget_old_replies()
        begin = self._journal.other_half()
        for parts in self._snapshot():
            self._write(parts)
        end = self._journal.end
        size = end - begin
        self._written, self._limit = 0, max(min(max(_MIN_GARBAGE, 4 * size), _WARM_GARBAGE), 2 * size)
        if not self._journal.start(begin):
            self._limit = math.inf
            self._table.log = None

    def _record(
        self, op: int, pairs: Pairs, request_id: RequestId | None, result: Any = None, *, forget: bool = False
    ) -> None:
        if self._written > self._limit:
            self.write_snapshot()
        reply = b""
        if request_id is not None and forget:
            self._replies.pop(request_id.identity, None)
        elif request_id is not None:
            reply = self._keep_reply(request_id, result)
        parts = records.encode(op, pairs, request_id, reply)
        self._write(parts)
        if self.replicator is not None:
            self.replicator.send(parts)

    def _keep_reply(self, request_id: RequestId, result: Any) -> bytes:
        """Keep and return the response frame of a request, as the latest of its identity."""
        identity, number = request_id
        reply = codec.encode_result(0, result)
        self._replies.pop(identity, None)
        self._replies[identity] = number, reply
        return reply

    def _snapshot(self) -> Iterator[list[bytes]]:
        return records.snapshot(*self._table.contents(), self._replies)

    def _write(self, parts: list[bytes]) -> None:
        size = sum(map(len, parts))
        self._written += size
        if size <= _MAX_JOINED:
            self._journal.append(b"".join(parts))
        else:
            self._journal.append_parts(parts)

    def _forget_old_replies(self) -> None:
        replies = self._replies
        while len(replies) > MAX_REPLIES:
            replies.pop(next(iter(replies)))
        sizes = [(identity, len(reply)) for identity, (_, reply) in replies.items()]
        for identity in list(surplus(sizes[:-1], sum(size for _, size in sizes))):
            del replies[identity]
