"""Replies to the joins of all members of a world: encoded once, and sent to some members at a time."""

from __future__ import annotations

import asyncio
import weakref
import zlib

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.schemas import JoinReply

_COMPRESSED_MEMBERS = 64
"""Number of members from which a reply is compressed, if the client accepts it."""
_SENT_MEMBERS = 32
_GZIP = 16 + zlib.MAX_WBITS


class SharedReply:
    """A reply as JSON.

    Attributes:
        content: the JSON.
        compressed: the JSON compressed by gzip, to about a fifth; None of a short one.
        turns: limits how many members are sent the reply at a time, for the other clients and for the memory.
    """

    def __init__(self, reply: JoinReply) -> None:
        self.content = json_text.encode(reply)
        large = len(reply.members) >= _COMPRESSED_MEMBERS
        self.compressed = zlib.compress(self.content, level=1, wbits=_GZIP) if large else None
        self.turns = asyncio.Semaphore(_SENT_MEMBERS)


class SharedReplies:
    """The encoded replies, each as long as the reply itself is kept."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[SharedReply]] = {}

    async def encoded(self, reply: JoinReply) -> SharedReply:
        """Return a reply as JSON, the same one each time."""
        key = id(reply)
        if key not in self._replies:
            self._replies[key] = asyncio.ensure_future(asyncio.to_thread(SharedReply, reply))
            weakref.finalize(reply, self._replies.pop, key, None).atexit = False
        return await asyncio.shield(self._replies[key])
