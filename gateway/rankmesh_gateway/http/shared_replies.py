"""Replies to the joins of a world's members: what they share is encoded once; each gets its partners' addresses."""

from __future__ import annotations

import asyncio
import weakref
import zlib

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.overlay import partners
from rankmesh_agent.wire.schemas import LISTED_MEMBERS, JoinReply, Member

_COMPRESSED_MEMBERS = 64
"""Size of a world from which a reply is compressed, if the client accepts it."""
_SENT_MEMBERS = 32
_GZIP = 16 + zlib.MAX_WBITS


class SharedReply:
    """A reply as JSON: what all members get, encoded once, and the members of which each gets some.

    Attributes:
        is_long: whether a client that accepts it gets the reply compressed.
        turns: limits how many members are sent the reply at a time, for the other clients and for the memory.
    """

    def __init__(self, reply: JoinReply) -> None:
        document = {name: value for name, value in vars(reply).items() if name != "members"}
        self._world_size, self._complete = reply.world_size, reply.complete
        self._head = json_text.encode(document)[:-1] + b',"members":['
        self._members = [json_text.encode(member) for member in reply.members]
        self._ranks = {member.instance: member.rank for member in reply.members}
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._compressed_head = self._compressor.compress(self._head) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self.is_long = reply.world_size >= _COMPRESSED_MEMBERS
        self.turns = asyncio.Semaphore(_SENT_MEMBERS)

    def content_for(self, member: Member) -> bytes:
        """Return the reply to a member."""
        return self._head + self._tail_for(member)

    def compressed_for(self, member: Member) -> bytes:
        """Return the reply to a member in gzip's format."""
        rest = self._compressor.copy()
        return b"".join((self._compressed_head, rest.compress(self._tail_for(member)), rest.flush()))

    def _tail_for(self, member: Member) -> bytes:
        members = self._members
        if self._complete:
            rank = self._ranks[member.instance]
            full_mesh = member.full_mesh if member.full_mesh >= 0 else LISTED_MEMBERS
            ranks = [rank, *partners(rank, self._world_size, full_mesh)]
            members = [members[each] for each in sorted(ranks)]
        return b",".join(members) + b"]}"


class SharedReplies:
    """The encoded replies, each as long as the reply itself is kept."""

    def __init__(self) -> None:
        self._replies: dict[int, SharedReply] = {}

    def encoded(self, reply: JoinReply) -> SharedReply:
        """Return a reply as JSON, the same one each time."""
        key = id(reply)
        if key not in self._replies:
            self._replies[key] = SharedReply(reply)
            weakref.finalize(reply, self._replies.pop, key, None).atexit = False
        return self._replies[key]
