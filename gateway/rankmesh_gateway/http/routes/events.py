"""The event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse
from starlette.types import Send

from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, ServicesDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.http.sse import stream
from rankmesh_gateway.state.event_log import KEPT_EVENTS

_log = logging.getLogger("rankmesh")

router = APIRouter(prefix="/v1", tags=["events"], dependencies=[BEARER], responses=problems(503))

SLOW_SECONDS = 10.0
"""A listener that reads nothing for this long is disconnected."""
_EVENT_STREAM = "text/event-stream"
_EVENT = {
    "description": "Each of the events.",
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
}
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {_EVENT_STREAM: {"schema": _EVENT}},
        "description": "Server-sent events, until the client disconnects or the gateway ends.",
    }
}

LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=64,
        description=f"The id of the last event received: the stream begins with those behind it, of the last "
        f"{KEPT_EVENTS}. With an id of an earlier gateway process, or another text, it begins with all of these.",
    ),
]
After = Annotated[
    int | None, Query(ge=0, le=(1 << 63) - 1, description="The same for clients that cannot set headers; 0 for all.")
]
WithOverview = Annotated[
    bool, Query(description="Also send an event `overview` once a second, without an id: the body of `/v1/overview`.")
]


class EventStream(StreamingResponse):
    """Server-sent events, without a buffer for slow clients: each has a position in the log."""

    media_type = _EVENT_STREAM

    async def stream_response(self, send: Send) -> None:
        """Send until the stream ends, or the client reads nothing for SLOW_SECONDS.

        Raises:
            TooManyListenersError: there are MAX_LISTENERS listeners; there is no response yet.
        """
        pieces = cast("AsyncGenerator[bytes]", self.body_iterator)
        async with contextlib.aclosing(pieces):
            piece: bytes | None = await anext(pieces)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while piece is not None:
                try:
                    async with asyncio.timeout(SLOW_SECONDS):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    _log.warning("a listener to events read nothing for %g s; it is disconnected", SLOW_SECONDS)
                    return
                piece = await anext(pieces, None)
            await send({"type": "http.response.body", "body": b""})


@router.get("/events", status_code=200, response_class=EventStream, responses=_TEXT | problems(422))
async def events(
    services: ServicesDep,
    last_event_id: LastEventId = None,
    after: After = None,
    overview: WithOverview = False,
    job: JobName = None,
) -> EventStream:
    """Stream the events as server-sent events, each with an id, its kind and JSON data.

    The kinds are `rank-joining`, `world-complete`, `rank-suspect`, `rank-alive`, `rank-failed`, `rank-left`,
    `group-made`, `group-failed`, `group-ended`, `call-held-up`, `call-ended` (of a call that was held up),
    `job-restarted`, `agent-registered`, `agent-leased`, `agent-freed` and `agent-lost`. The data is an object with
    `time` (seconds since 1970), `job`, `ranks`, `group` (an id), `detail` (a sentence), and `epoch` or `agent` (a name)
    where there is one. When the gateway ends, the last event, without an id, is `gateway-ended`.

    Without an id to resume from, the stream begins with the next event. A client that falls so far behind that it would
    miss events, or reads nothing for 10 s, is disconnected, and resumes with the id of the last event it received. An
    idle stream gets a comment every 10 s.
    """
    log = services.registry.events
    seen = after if last_event_id is None else _number(last_event_id)
    return EventStream(
        stream(
            log,
            log.resume_position(seen),
            services.registry.poll_timeouts,
            (lambda: services.snapshots.cached_json(job)) if overview else None,
            job,
        ),
        headers={"content-type": _EVENT_STREAM, "cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _number(text: str) -> int:
    """Return the id in a header; 0, which no log has, for any other text."""
    return int(text) if text.isascii() and text.isdigit() else 0
