"""Replies to the joins of a world's members: what they share is encoded once; each gets its partners' addresses."""

from __future__ import annotations

import asyncio
import struct
import weakref
import zlib

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.overlay import partners
from rankmesh_agent.wire.schemas import LISTED_MEMBERS, JoinReply, Member

_COMPRESSED_MEMBERS = 64
"""Size of a world from which a reply is compressed, if the client accepts it."""
_SENT_MEMBERS = 32
_GZIP = 16 + zlib.MAX_WBITS
_TRAILER = struct.Struct("<II")
"""Of gzip: checksum and size of the text."""


class SharedReply:
    """A reply as JSON: what all members get, encoded once, and the members of which each gets some.

    Attributes:
        is_long: whether a client that accepts it gets the reply compressed.
        turns: limits how many members are sent the reply at a time, for the other clients and for the memory.
    """

    def __init__(self, reply: JoinReply) -> None:
        document = {name: value for name, value in vars(reply).items() if name != "members"}
        self._reply = reply
        self._head = json_text.encode(document)[:-1] + b',"members":['
        self._members = [json_text.encode(member) for member in reply.members]
        self._ranks = {member.instance: member.rank for member in reply.members}
        compressor = zlib.compressobj(wbits=_GZIP)
        self._compressed_head = compressor.compress(self._head) + compressor.flush(zlib.Z_SYNC_FLUSH)
        self._checksum = zlib.crc32(self._head)
        self.is_long = reply.world_size >= _COMPRESSED_MEMBERS
        self.turns = asyncio.Semaphore(_SENT_MEMBERS)

    def content_for(self, member: Member) -> bytes:
        """Return the reply to a member."""
        return self._head + self._tail_for(member)

    def compressed_for(self, member: Member) -> bytes:
        """Return the reply to a member in gzip's format; what not all get is not compressed, which would take long."""
        tail = self._tail_for(member)
        stored = zlib.compressobj(level=0, wbits=-zlib.MAX_WBITS, memLevel=1)
        trailer = _TRAILER.pack(zlib.crc32(tail, self._checksum), len(self._head) + len(tail))
        return b"".join((self._compressed_head, stored.compress(tail), stored.flush(), trailer))

    def _tail_for(self, member: Member) -> bytes:
        members = self._members
        if self._reply.complete:
            rank = self._ranks[member.instance]
            full_mesh = member.full_mesh if member.full_mesh >= 0 else LISTED_MEMBERS
            ranks = [rank, *partners(rank, self._reply.world_size, full_mesh)]
            members = [members[each] for each in sorted(ranks)]
        return b",".join(members) + b"]}"


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
