"""Requests as handlers see them, besides parameters and body; and replies in bytes, those to joins encoded once."""

from __future__ import annotations

import asyncio
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rankmesh_agent.http.middleware import Message, Receive, Send
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.overlay import partners
from rankmesh_agent.wire.schemas import LISTED_MEMBERS, JoinReply, Member

Headers = Iterable[tuple[bytes, bytes]]

_BUFFERED_BYTES = 64 << 10
"""Size up to which a response is left to the buffers of its connection."""


@dataclass
class Request:
    """A request whose body has been received; ``job``: the only job that its client may see; None for all."""

    scope: Message
    receive: Receive
    job: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def header(self, name: str) -> str:
        """Return a header of the request, empty without it."""
        found: bytes = dict(self.scope["headers"]).get(name.encode(), b"")
        return found.decode("latin-1")


@dataclass(frozen=True)
class Reply:
    """A reply in bytes."""

    content: bytes
    headers: Mapping[str, str]
    status: int = HTTPStatus.OK

    async def send(self, receive: Receive, send: Send) -> None:
        """Send it."""
        await send_content(send, self.status, self.content, encoded(self.headers))


def described(*kinds: str, schema: Mapping[str, Any] = {"type": "string"}, description: str = "") -> dict[str, Any]:
    """Return the response of an endpoint that is not JSON, for the OpenAPI document."""
    text = {"description": description} if description else {}
    return {"responses": {200: {"content": {kind: {"schema": schema} for kind in kinds}, **text}}}


def encoded(headers: Mapping[str, str]) -> Headers:
    """Return headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def send_content(send: Send, status: int, content: bytes, headers: Headers) -> None:
    """Send a response."""
    lines = [*headers, (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": int(status), "headers": lines})
    if len(content) > _BUFFERED_BYTES:  # the end is sent once the client has received most of it
        await send({"type": "http.response.body", "body": content, "more_body": True})
        content = b""
    await send({"type": "http.response.body", "body": content})


_COMPRESSED_MEMBERS = 64
"""Size of a world from which a reply is compressed, if the client accepts it."""
_SENT_MEMBERS = 32
_GZIP = 16 + zlib.MAX_WBITS
_JSON = ((b"content-type", b"application/json"),)


class SharedReply:
    """A reply as JSON: what all members get, encoded once, and the members of which each gets some.

    Few members are sent it at a time, for the other clients and for the memory.
    """

    def __init__(self, reply: JoinReply) -> None:
        document = {name: value for name, value in vars(reply).items() if name != "members"}
        self._world_size, self._complete = reply.world_size, reply.complete
        self._head = json_text.encode(document)[:-1] + b',"members":['
        self._members = [json_text.encode(member) for member in reply.members]
        self._ranks = {member.instance: member.rank for member in reply.members}
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._compressed_head = self._compressor.compress(self._head) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._is_long = reply.world_size >= _COMPRESSED_MEMBERS
        self._turns = asyncio.Semaphore(_SENT_MEMBERS)

    async def send(self, send: Send, member: Member, gzip: bool) -> None:
        """Send the reply to a member, in gzip's format if its client accepts that and the reply is long."""
        async with self._turns:
            tail = self._tail_for(member)
            if gzip and self._is_long:
                rest = self._compressor.copy()
                content = b"".join((self._compressed_head, rest.compress(tail), rest.flush()))
                await send_content(send, HTTPStatus.OK, content, (*_JSON, (b"content-encoding", b"gzip")))
            else:
                await send_content(send, HTTPStatus.OK, self._head + tail, _JSON)

    def _tail_for(self, member: Member) -> bytes:
        members = self._members
        if self._complete:
            rank = self._ranks[member.instance]
            full_mesh = member.full_mesh if member.full_mesh >= 0 else LISTED_MEMBERS
            ranks = [rank, *partners(rank, self._world_size, full_mesh)]
            members = [*map(members.__getitem__, sorted(ranks))]
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
