"""The event log as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from msgspec import Meta

from rankmesh_agent.http.middleware import Receive, Send
from rankmesh_gateway.http.handlers import JobQuery, Services
from rankmesh_gateway.http.replies import Request, described, encoded
from rankmesh_gateway.state.event_log import KEPT_EVENTS, EventLog

_log = logging.getLogger("rankmesh")

KEEP_ALIVE_SECONDS = 10.0
"""Interval of comments on an idle stream, for proxies and to detect clients that have disconnected."""
TICK_SECONDS = 1.0
"""Interval of the snapshots and of the liveness scan."""
RETRY_MILLISECONDS = 1000
"""Delay after which a client whose connection broke reconnects."""
SLOW_SECONDS = 10.0
"""A listener that reads nothing for this long is disconnected."""
_ID_CHARACTERS = 64
_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
DOCUMENT: dict[str, Any] = described(
    "text/event-stream",
    schema={
        "description": "Each of the events.",
        "type": "object",
        "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    },
    description="Server-sent events, until the client disconnects or the gateway ends.",
)
DOCUMENT["parameters"] = [
    {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": {"type": "string"},
        "description": "The id of the last event received: the stream begins with those behind it, of the last "
        f"{KEPT_EVENTS}. With an id of an earlier gateway process, or another text, it begins with all of these.",
    }
]


@dataclass
class EventsQuery(JobQuery):
    """Query of the event stream."""

    after: (
        Annotated[
            int, Meta(ge=0, le=(1 << 63) - 1, description="The same for clients that cannot set headers; 0 for all.")
        ]
        | None
    ) = None
    overview: Annotated[
        bool,
        Meta(description="Also send an event `overview` once a second, without an id: the body of `/v1/overview`."),
    ] = False


async def stream(
    log: EventLog,
    position: int,
    poll_timeouts: Callable[[], None],
    overview: Callable[[], bytes] | None,
    job: str | None = None,
) -> AsyncGenerator[bytes]:
    """Yield the events of one listener behind a position, until the log is closed or has dropped some of them."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news.set)

    with log.subscribe(wake):
        # Clients keep the id of an event without data: no event is lost if the connection breaks early.
        yield f"retry: {RETRY_MILLISECONDS}\nid: {position}\n\n".encode()
        sent, ticked = loop.time(), float("-inf")
        closed = False
        while not closed:
            closed = log.closed  # the last round sends how the jobs have ended
            news.clear()
            if closed or loop.time() - ticked >= TICK_SECONDS:
                ticked = loop.time()
                poll_timeouts()
                if overview is not None:
                    yield b"event: overview\ndata: " + overview() + b"\n\n"
                    sent = loop.time()
            if log.has_dropped(position):
                return
            events = log.since(position)
            if events:
                position = events[-1].id
            events = [each for each in events if job in (None, each.job)]
            if events:
                yield "".join(f"id: {each.id}\nevent: {each.kind}\ndata: {each.data}\n\n" for each in events).encode()
                sent = loop.time()
            elif loop.time() - sent >= KEEP_ALIVE_SECONDS:
                yield b": nothing new\n\n"
                sent = loop.time()
            if not closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), max(0.0, ticked + TICK_SECONDS - loop.time()))
        yield b"event: gateway-ended\ndata: {}\n\n"


class EventStream:
    """Server-sent events, without a buffer for slow clients: each has a position in the log."""

    def __init__(self, first: bytes, pieces: AsyncGenerator[bytes]) -> None:
        self._first, self._pieces = first, pieces

    async def send(self, receive: Receive, send: Send) -> None:
        """Send until the stream ends, the client disconnects, or reads nothing for SLOW_SECONDS."""
        async with contextlib.aclosing(self._pieces) as pieces:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": encoded(_HEADERS)})
            sending, gone = (asyncio.ensure_future(each) for each in (self._send(pieces, send), _disconnected(receive)))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending

    async def _send(self, pieces: AsyncGenerator[bytes], send: Send) -> None:
        piece: bytes | None = self._first
        while piece is not None:
            try:
                async with asyncio.timeout(SLOW_SECONDS):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except TimeoutError:
                _log.warning("a listener to events read nothing for %g s; it is disconnected", SLOW_SECONDS)
                return
            piece = await anext(pieces, None)
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(services: Services, query: EventsQuery, request: Request) -> EventStream:
    """Stream the events as server-sent events, each with an id, its kind and JSON data.

    The kinds are `rank-joining`, `world-complete`, `rank-suspect`, `rank-alive`, `rank-failed`, `rank-left`,
    `rank-slow` (it makes the others wait), `rank-in-time` (no longer), `group-made`, `group-failed`, `group-ended`,
    `call-held-up`, `call-ended` (of a call that was held up), `job-restarted`, `agent-registered`, `agent-leased`,
    `agent-freed` and `agent-lost`. The data is an object with `time` (seconds since 1970), `job`, `ranks`, `group` (an
    id), `detail` (a sentence), and `epoch` or `agent` (a name) where there is one. When the gateway ends, the last
    event, without an id, is `gateway-ended`.

    Without an id to resume from, the stream begins with the next event. A client that falls so far behind that it would
    miss events, or reads nothing for 10 s, is disconnected, and resumes with the id of the last event it received. An
    idle stream gets a comment every 10 s.
    """
    log = services.registry.events
    last = request.header("last-event-id")
    seen = _number(last) if last else query.after
    overview = (lambda: services.snapshots.cached_json(query.job)) if query.overview else None
    pieces = stream(log, log.resume_position(seen), services.registry.poll_timeouts, overview, query.job)
    return EventStream(await anext(pieces), pieces)


def _number(text: str) -> int:
    """Return the id in a header; 0, which no log has, for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _ID_CHARACTERS else 0
