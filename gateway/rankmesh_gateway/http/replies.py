"""Requests as handlers see them, besides parameters and body, and replies that are not JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rankmesh_agent.http.middleware import Message, Receive, Send

Headers = Iterable[tuple[bytes, bytes]]

_BUFFERED_BYTES = 64 << 10
"""Size up to which a response is left to the buffers of its connection."""


@dataclass
class Request:
    """A request whose body has been received.

    Attributes:
        scope: its method, path and headers.
        receive: returns when the client has disconnected.
        job: the only job that its client may see; None for all.
        headers: more headers of the reply.
    """

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
