"""Replies to the joins of all members of a world: encoded once, and sent to some members at a time."""

from __future__ import annotations

import asyncio
import json
import weakref
import zlib
from collections.abc import Iterator
from itertools import islice

from rankmesh_agent.wire.schemas import JoinReply, Member

_COMPRESSED_MEMBERS = 64
"""Number of members from which a reply is compressed, if the client accepts it."""
_ENCODED_MEMBERS = 500
"""Members that are encoded before other requests have their turn: 5 ms."""
_SENT_MEMBERS = 32
_GZIP = 16 + zlib.MAX_WBITS
_NO_MEMBERS = '"members": []'


class SharedReply:
    """A reply as JSON.

    Attributes:
        content: the JSON.
        compressed: the JSON compressed by gzip, to about a fifth; None of a short one.
        turns: limits how many members are sent the reply at a time, for the other clients and for the memory.
    """

    def __init__(self) -> None:
        self.content = b""
        self.compressed: bytes | None = None
        self.turns = asyncio.Semaphore(_SENT_MEMBERS)

    async def encode(self, reply: JoinReply) -> SharedReply:
        """Encode a reply; return this object."""
        before, after = json.dumps(vars(reply) | {"members": []}).split(_NO_MEMBERS)
        texts, compressed = [f'{before}"members": ['.encode()], []
        compressor = zlib.compressobj(level=1, wbits=_GZIP)
        members: Iterator[Member] = iter(reply.members)
        while piece := list(islice(members, _ENCODED_MEMBERS)):
            if len(texts) > 1:
                texts.append(b", ")
                await asyncio.sleep(0)
            texts.append(json.dumps(piece, default=vars)[1:-1].encode())
        texts.append(f"]{after}".encode())
        if len(reply.members) >= _COMPRESSED_MEMBERS:
            for text in texts:
                compressed.append(compressor.compress(text))
                if len(text) > _ENCODED_MEMBERS:
                    await asyncio.sleep(0)
            self.compressed = b"".join([*compressed, compressor.flush()])
        self.content = b"".join(texts)
        return self


class SharedReplies:
    """The encoded replies, each as long as the reply itself is kept."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Task[SharedReply]] = {}

    async def encoded(self, reply: JoinReply) -> SharedReply:
        """Return a reply as JSON, the same one each time."""
        key = id(reply)
        if key not in self._replies:
            self._replies[key] = asyncio.ensure_future(SharedReply().encode(reply))
            weakref.finalize(reply, self._replies.pop, key, None).atexit = False
        return await asyncio.shield(self._replies[key])
