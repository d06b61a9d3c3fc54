"""Replies to the joins of all members of a world: encoded once, and sent to some members at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
import weakref
from functools import cached_property

from rankmesh_agent.wire.schemas import JoinReply

_COMPRESSED_BYTES = 8 << 10
"""Size from which a reply is compressed, if the client accepts it."""
_MEMBERS_AT_A_TIME = 32


class SharedReply:
    """A reply as JSON.

    Attributes:
        content: the JSON.
        turns: limits how many members are sent the reply at a time, for the other clients and for the memory.
    """

    def __init__(self, reply: JoinReply) -> None:
        self.content = json.dumps(reply, default=vars).encode()
        self.turns = asyncio.Semaphore(_MEMBERS_AT_A_TIME)

    @cached_property
    def compressed(self) -> bytes | None:
        """The JSON compressed by gzip, about a fifth; None of a short one."""
        return gzip.compress(self.content, compresslevel=1, mtime=0) if len(self.content) >= _COMPRESSED_BYTES else None


class SharedReplies:
    """The encoded replies, each as long as the reply itself is kept."""

    def __init__(self) -> None:
        self._replies: dict[int, SharedReply] = {}

    def encoded(self, reply: JoinReply) -> SharedReply:
        """Return a reply as JSON, the same one each time."""
        key = id(reply)
        if key not in self._replies:
            self._replies[key] = SharedReply(reply)
            weakref.finalize(reply, self._replies.pop, key, None)
        return self._replies[key]
