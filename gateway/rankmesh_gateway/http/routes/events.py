"""What happens, as it happens, and all there is to see at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rankmesh_gateway.http.routes.dependencies import BEARER, RegistryDep, SnapshotDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.http.sse import stream
from rankmesh_gateway.schemas import Overview
from rankmesh_gateway.state.event_log import KEPT_EVENTS, TooManyListenersError

_log = logging.getLogger("rankmesh")

router = APIRouter(prefix="/v1", tags=["events"], dependencies=[BEARER], responses=problems(401, 403, 413, 421))

SLOW_SECONDS = 10.0
"""A listener that takes nothing for this long is sent away."""
_EVENT_STREAM = "text/event-stream"
_EVENT = {
    "description": "Each of the events.",
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
}
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {_EVENT_STREAM: {"schema": _EVENT}},
        "description": "Server-sent events, until the client hangs up or the gateway ends.",
    }
}

LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=64,
        description=f"The id of the last event seen: those behind it come first, as far as they are among the last "
        f"{KEPT_EVENTS}. With an id of an earlier gateway process, or what is no id, all of these come.",
    ),
]
After = Annotated[
    int | None, Query(ge=0, le=(1 << 63) - 1, description="The same for clients that cannot set headers; 0 for all.")
]
WithOverview = Annotated[
    bool, Query(description="Also send an event `overview` once a second, without an id: the body of `/v1/overview`.")
]


class EventStream(Response):
    """Server-sent events. Nothing is buffered for a slow client: it goes on from its own place in the log."""

    media_type = _EVENT_STREAM

    def __init__(self, pieces: AsyncIterator[bytes] | None = None) -> None:
        super().__init__(
            headers={"content-type": _EVENT_STREAM, "cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is no more, the client has gone, or it takes nothing."""
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(TooManyListenersError):  # others came between the look and this
                    sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        assert self._pieces is not None
        async with contextlib.aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                try:
                    await asyncio.wait_for(
                        send({"type": "http.response.body", "body": piece, "more_body": True}), SLOW_SECONDS
                    )
                except TimeoutError:
                    _log.warning("a listener to events took nothing for %g s; it is sent away", SLOW_SECONDS)
                    return
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get("/events", status_code=200, response_class=EventStream, responses=_TEXT | problems(422, 503))
async def events(
    registry: RegistryDep,
    overviews: SnapshotDep,
    last_event_id: LastEventId = None,
    after: After = None,
    overview: WithOverview = False,
) -> EventStream:
    """Send what happens as server-sent events, each with an id, its kind and JSON data.

    The kinds are `rank-joining`, `world-complete`, `rank-suspect`, `rank-alive`, `rank-failed`, `rank-left`,
    `group-made`, `group-failed`, `group-ended`, `agent-registered`, `agent-leased`, `agent-freed` and `agent-lost`. The
    data is an object with `time` (seconds since 1970), `job`, `ranks`, `group` (an id), `detail` (a sentence), and
    `epoch` or `agent` (a name) where there is one.

    Without a place to go on from, only what happens from now on. A client that falls so far behind that it would miss
    events, or takes nothing for 10 s, is cut off, and comes again with the id of the last event it saw. A comment is
    sent every 10 s in which nothing else is.
    """
    log = registry.events
    log.check_capacity()
    seen = after if last_event_id is None else _number(last_event_id)
    return EventStream(
        stream(log, log.resume_position(seen), registry.poll_timeouts, overviews.cached_json if overview else None)
    )


@router.get("/overview", responses=problems(422))
async def overview(overviews: SnapshotDep) -> Overview:
    """Tell all there is to see: ranks, agents, groups, calls in flight, rates, and what is in the jobs' stores."""
    return await overviews.refresh()


def _number(text: str) -> int:
    """Return the id that a header names; one that no log has, if it is none."""
    return int(text) if text.isascii() and text.isdigit() else 0
