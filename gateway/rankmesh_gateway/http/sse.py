"""The event log as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from rankmesh_gateway.state.event_log import Event, EventLog

KEEP_ALIVE_SECONDS = 10.0
"""After so long without anything else a comment is sent, for proxies, and to find out who has gone."""
TICK_SECONDS = 1.0
"""How often overviews are sent, and silent ranks looked for."""
RETRY_MILLISECONDS = 1000
"""After how long a client whose connection broke is to come again."""


async def stream(
    log: EventLog, position: int, look: Callable[[], None], overview: Callable[[], bytes] | None
) -> AsyncIterator[bytes]:
    """Yield what is sent to a listener, until the log is closed, or the listener is so slow that it has missed events.

    Args:
        log: the log.
        position: the events behind it are sent.
        look: has the log told of silent ranks.
        overview: returns an overview as JSON; None for a listener that wants none.

    Raises:
        TooManyListenersError: as many listen as may.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(news.set)

    with log.subscribe(wake):
        # An event without data is none, but its id counts: nothing is missed if the connection breaks before the first.
        yield f"retry: {RETRY_MILLISECONDS}\nid: {position}\n\n".encode()
        sent, ticked = loop.time(), float("-inf")
        while not log.closed:
            news.clear()
            if loop.time() - ticked >= TICK_SECONDS:
                ticked = loop.time()
                look()
                if overview is not None:
                    yield b"event: overview\ndata: " + overview() + b"\n\n"
                    sent = loop.time()
            if log.has_dropped(position):
                return
            found = log.since(position)
            if found:
                position = found[-1].id
                yield "".join(map(_encoded, found)).encode()
                sent = loop.time()
            elif loop.time() - sent >= KEEP_ALIVE_SECONDS:
                yield b": nothing new\n\n"
                sent = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), max(0.0, ticked + TICK_SECONDS - loop.time()))


def _encoded(event: Event) -> str:
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.data}\n\n"
