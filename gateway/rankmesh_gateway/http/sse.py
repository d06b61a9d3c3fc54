"""The event log as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from rankmesh_gateway.state.event_log import EventLog

KEEP_ALIVE_SECONDS = 10.0
"""Interval of comments on an idle stream, for proxies and to detect clients that have disconnected."""
TICK_SECONDS = 1.0
"""Interval of the snapshots and of the liveness scan."""
RETRY_MILLISECONDS = 1000
"""Delay after which a client whose connection broke reconnects."""


async def stream(
    log: EventLog,
    position: int,
    poll_timeouts: Callable[[], None],
    overview: Callable[[], bytes] | None,
    job: str | None = None,
) -> AsyncGenerator[bytes]:
    """Yield the stream of one listener, until the log is closed or has dropped events that were not sent.

    Args:
        log: the event log.
        position: the stream begins behind it.
        poll_timeouts: logs which ranks have fallen silent.
        overview: returns a snapshot as JSON; None for a listener without snapshots.
        job: only the events of this job; None for all.

    Raises:
        TooManyListenersError: there are MAX_LISTENERS listeners.
    """
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
