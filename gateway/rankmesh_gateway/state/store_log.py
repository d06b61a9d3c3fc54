"""Log of a store's changes, as rows of a backend: each change is one write, with the reply to its request.

Keys of the rows: ``job``, ``value/KEY``, ``queue/KEY/NUMBER`` and ``reply/NAME``.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Mapping
from typing import Any

from rankmesh_agent.store import codec
from rankmesh_agent.store.table import RETENTION_SECONDS, Changes, Table
from rankmesh_agent.wire.store_frames import RequestId
from rankmesh_gateway.state.store_backend import OutcomeUnknownError, Rows, StoreBackend

JOB = b"job"
_VALUE, _QUEUE, _REPLY = b"value", b"queue", b"reply"
_REPLY_HEAD = struct.Struct("!I")
"""Number of a request, before the reply to it."""
_MIDDLE = 10**19
"""Number of the first value that is appended to a queue. The digits of all numbers are 20."""
_EXPIRED_REPLIES = 2
"""Replies that have expired, and go with a write at most."""


class StoreLog:
    """Log of one table's changes."""

    def __init__(
        self, backend: StoreBackend, store: str, job: str, table: Table, rows: Mapping[bytes, bytes] | None = None
    ) -> None:
        self.request_id: RequestId | None = None
        self._backend, self._store, self._table = backend, store, table
        self._unwritten: dict[bytes, bytes | None] = {} if rows else {JOB: job.encode()}
        self._before: Rows = {}  # of a change whose outcome is unknown
        self._numbers: dict[str, tuple[int, int]] = {}  # of a queue's first value, and behind its last one
        self._replies: dict[bytes, float] = {}  # times of the replies by name, the oldest first
        if rows:
            self._load(rows)

    def _load(self, rows: Mapping[bytes, bytes]) -> None:
        values: dict[str, bytes] = {}
        queues: dict[str, list[bytes]] = {}
        for row, value in sorted(rows.items()):
            kind, _, rest = row.partition(b"/")
            if kind == _VALUE:
                values[rest.decode()] = value
            elif kind == _QUEUE:
                key, _, number = rest.decode().rpartition("/")
                queues.setdefault(key, []).append(value)
                first, _ = self._numbers.get(key, (int(number), 0))
                self._numbers[key] = first, int(number) + 1
            elif kind == _REPLY:
                name = bytes.fromhex(rest.decode())
                (number,) = _REPLY_HEAD.unpack_from(value)
                self._replies[name] = time.monotonic()  # its client may have waited for this gateway
                self._table.replies.add(RequestId(name, number), value[_REPLY_HEAD.size :])
        self._table.fill(values, queues)

    def begin(self) -> None:
        """Write whose store it is: the next gateway has it also if it is empty."""
        self._write({}, {})

    def changed(self, changes: Changes, result: Any) -> None:
        """See TableLog."""
        rows = {_row(_VALUE, key): value for key, value in changes.items()}
        self._write(rows, {_row(_VALUE, key): self._table.value(key) for key in changes}, (self.request_id, result))

    def pushed(self, key: str, value: bytes, *, first: bool) -> None:
        """See TableLog."""
        begin, end = self._numbers.get(key, (_MIDDLE, _MIDDLE))
        number = begin - 1 if first else end
        row = _row(_QUEUE, f"{key}/{number:020d}")
        if first and self.request_id is not None:  # its client has not got the reply
            self._write({row: value, _reply_row(self.request_id.name): None}, {row: None})
        else:
            self._write({row: value}, {row: None}, (self.request_id, None))
        self._numbers[key] = min(begin, number), max(end, number + 1)

    def popped(self, key: str, value: bytes, request_id: RequestId | None) -> None:
        """See TableLog."""
        begin, end = self._numbers[key]
        row = _row(_QUEUE, f"{key}/{begin:020d}")
        self._write({row: None}, {row: value}, (request_id, value))
        if begin + 1 == end:
            del self._numbers[key]
        else:
            self._numbers[key] = begin + 1, end

    def handed_over(self, value: bytes, request_id: RequestId | None) -> None:
        """See TableLog."""
        self._write({}, {}, (self.request_id, None), (request_id, value))

    def _write(self, rows: Rows, before: Rows, *replies: tuple[RequestId | None, Any]) -> None:
        """Write rows and replies; ``before`` are the rows as they are without the change."""
        if self._before:
            self._backend.write(self._store, self._before)
            self._before = {}
        now = time.monotonic()
        kept = {
            request_id.name: _REPLY_HEAD.pack(request_id.number) + codec.encode_result(0, result)
            for request_id, result in replies
            if request_id is not None
        }
        oldest = itertools.islice(self._replies.items(), _EXPIRED_REPLIES)
        expired = [name for name, at in oldest if at < now - RETENTION_SECONDS and name not in kept]
        replied: dict[bytes, bytes | None] = {**dict.fromkeys(expired), **kept}
        try:
            more = {_reply_row(name): frame for name, frame in replied.items()}
            self._backend.write(self._store, {**self._unwritten, **rows, **more})
        except OutcomeUnknownError:
            self._before = {**before, **{_reply_row(name): None for name in replied}}
            raise
        self._unwritten = {}
        for name in replied:
            self._replies.pop(name, None)
        self._replies.update(dict.fromkeys(kept, now))


def _row(kind: bytes, key: str) -> bytes:
    return kind + b"/" + key.encode()


def _reply_row(name: bytes) -> bytes:
    return _row(_REPLY, name.hex())
