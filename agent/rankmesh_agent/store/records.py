"""Records of a store's changes, and the state that they lead to. Pure: no I/O happens here.

A record holds one change. If a client could repeat the request that made it, the record also holds the request's
identity and its reply: so a store that is rebuilt from records executes no request twice. In native byte order::

    offset  size  field
    0       1     op       SET, PUSH, PUSH_FIRST, POP or REPLY
    2       2     length of the identity
    4       4     length of the reply
    8       8     number   of the request, within its identity
    16            the identity, the reply, and then for each key:
            4     length of the key
            4     length of the value + 1; 0 if there is none
                  the key, the value
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rankmesh_agent.wire.errors import ProtocolError

SET, PUSH, PUSH_FIRST, POP, REPLY = 1, 2, 3, 4, 5
"""New values of keys, none removes a key; a value appended to a queue, or put at its head; the first value of a queue
removed; nothing but a reply."""
MAX_SNAPSHOT_RECORD = 1 << 20
"""Size from which the values of a snapshot begin another record."""

_HEAD = struct.Struct("=BxHIQ")
_PAIR = struct.Struct("=II")
_ONE = struct.Struct("=BxHIQII")

Pairs = Iterable[tuple[str, bytes | None]]


class RequestId(NamedTuple):
    """The request that makes a change.

    Attributes:
        identity: of the client's connection, or the client's Idempotency-Key.
        number: of the request on the connection, or a digest of the request.
    """

    identity: bytes
    number: int


Replies = dict[bytes, tuple[int, bytes]]
"""Number and response frame of the latest request of each identity."""


def encode(op: int, pairs: Pairs, request_id: RequestId | None = None, reply: bytes = b"") -> list[bytes]:
    """Return the parts of a record.

    Args:
        op: the kind of the change.
        pairs: keys and values.
        request_id: the request that makes the change, if it could come again.
        reply: its reply; if empty, its earlier reply is forgotten.
    """
    identity, number = request_id or (b"", 0)
    parts = [_HEAD.pack(op, len(identity), len(reply), number), identity, reply]
    for key, value in pairs:
        name = key.encode()
        parts += _PAIR.pack(len(name), 0 if value is None else len(value) + 1), name, value or b""
    return parts


def encode_one(op: int, key: str, value: bytes, request_id: RequestId | None = None, reply: bytes = b"") -> bytes:
    """Return the record of one value: the same as ``encode``, in less time."""
    name = key.encode()
    if request_id is None:
        return _ONE.pack(op, 0, 0, 0, len(name), len(value) + 1) + name + value
    identity, number = request_id
    head, pair = _HEAD.pack(op, len(identity), len(reply), number), _PAIR.pack(len(name), len(value) + 1)
    return head + identity + reply + pair + name + value


class StoreState:
    """Values, queues and replies of a store, rebuilt from a sequence of records.

    Attributes:
        values: the values by key.
        queues: the queues by key; none is empty.
        replies: the replies to requests that may come again, the oldest first.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.replies: Replies = {}

    def apply(self, record: bytes) -> None:
        """Apply the next record.

        Raises:
            ProtocolError: it is malformed; a part of it may have been applied.
        """
        try:
            self._apply(record)
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ProtocolError(f"a record of {len(record)} bytes of a store's changes is malformed") from None

    def _apply(self, record: bytes) -> None:
        op, identity_size, reply_size, number = _HEAD.unpack_from(record)
        at = _HEAD.size + identity_size
        if identity_size:
            identity = record[_HEAD.size : at]
            self.replies.pop(identity, None)
            if reply_size:
                self.replies[identity] = number, record[at : at + reply_size]
        for key, value in _pairs(record, at + reply_size):
            if op == SET:
                if value is None:
                    self.values.pop(key, None)
                else:
                    self.values[key] = value
            elif op == POP:
                self.queues[key].popleft()
                if not self.queues[key]:
                    del self.queues[key]
            elif value is not None:
                queue = self.queues.setdefault(key, deque())
                (queue.append if op == PUSH else queue.appendleft)(value)


def snapshot(
    values: Mapping[str, bytes], queues: Mapping[str, Iterable[bytes]], replies: Replies
) -> Iterator[list[bytes]]:
    """Yield the records, in parts, that lead to a state."""
    batch: list[tuple[str, bytes]] = []
    size = 0
    for key, value in values.items():
        batch.append((key, value))
        size += len(key) + len(value)
        if size >= MAX_SNAPSHOT_RECORD:
            yield encode(SET, batch)
            batch, size = [], 0
    if batch:
        yield encode(SET, batch)
    for key, queue in queues.items():
        for value in queue:
            yield encode(PUSH, [(key, value)])
    for identity, (number, reply) in replies.items():
        yield encode(REPLY, (), RequestId(identity, number), reply)


def _pairs(record: bytes, at: int) -> Iterator[tuple[str, bytes | None]]:
    while at < len(record):
        key_size, value_size = _PAIR.unpack_from(record, at)
        at += _PAIR.size
        key = record[at : at + key_size].decode()
        at += key_size
        yield key, record[at : at + value_size - 1] if value_size else None
        at += max(0, value_size - 1)
