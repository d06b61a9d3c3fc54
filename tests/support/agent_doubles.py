"""Agents that do as a test says: one server plays those of all ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Answer = tuple[int, Any]
Play = Callable[[str, str, Any], Awaitable[Answer] | Answer]
"""Given method, path and the request's JSON, what is answered."""


class Agents:
    """The agents of several ranks; rank r's base URL is ``url(r)``.

    Attributes:
        plays: what each rank's agent does; with others it is ``usual``.
        asked: what they were asked: rank, method, path, document.
        hung_up: the ranks whose client went away before the answer.
    """

    def __init__(self) -> None:
        self.base = ""
        self.plays: dict[int, Play] = {}
        self.asked: list[tuple[int, str, str, Any]] = []
        self.hung_up: list[int] = []

    def url(self, rank: int) -> str:
        return f"{self.base}/{rank}"

    def usual(self, method: str, path: str, document: Any) -> Answer:
        if (method, path) == ("POST", "/v1/groups"):
            return 201, {"id": "00000000000000cc", "name": document["name"], "ranks": document["ranks"]}
        if method == "DELETE":
            return 204, None
        return 200, {}

    def what(self, method: str, ending: str = "") -> list[int]:
        """The ranks that were asked so."""
        return sorted(rank for rank, asked, path, _ in self.asked if asked == method and path.endswith(ending))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        _, rank, path = scope["path"].split("/", 2)
        document = json.loads(body) if body else None
        self.asked.append((int(rank), scope["method"], f"/{path}", document))
        reported = self.plays.get(int(rank), self.usual)(scope["method"], f"/{path}", document)
        if not isinstance(reported, tuple):
            answering, gone = asyncio.ensure_future(reported), asyncio.ensure_future(receive())
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                self.hung_up.append(int(rank))
                return
            gone.cancel()
            reported = answering.result()
        status, document = reported
        content = b"" if document is None else json.dumps(document).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})


def problem(status: int, code: str, detail: str) -> Play:
    """An agent that refuses."""
    return lambda method, path, document: (status, {"status": status, "code": code, "detail": detail})


def silent(method: str, path: str, document: Any) -> Awaitable[Answer]:
    """An agent that does not answer."""

    async def never() -> Answer:
        await asyncio.sleep(60)
        return 200, None

    return never()
