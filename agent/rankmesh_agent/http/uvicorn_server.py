"""Uvicorn for a thread of a rank: its main loop waits for an event, and connections may leave HTTP by an upgrade.

With upgrades, the application is created at the first request: an upgraded connection needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rankmesh_agent.http.middleware import Application, Message, Receive, Send
from rankmesh_agent.net.descriptors import is_exhausted, warn_exhausted
from rankmesh_agent.net.fork import detach
from rankmesh_agent.net.sockets import BACKLOG
from rankmesh_agent.wire.upgrade import Upgrade

ConnectionHandlers = Mapping[Upgrade, Callable[[socket.socket], None]]
"""Functions that serve the connections whose clients ask for another protocol."""
_KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection is kept: ranks of a large job send a heartbeat in some tens of seconds."""
_ACCEPTED_AT_ONCE = 256
_TICK_SECONDS = 1.0
"""Interval of uvicorn's periodic work: it sets the Date header of responses."""


def _is_of_end(record: logging.LogRecord) -> bool:
    """Return whether a record reports a request that is cancelled because it goes on after the server's end."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return cancelled or str(record.msg).startswith("Cancel %s running task(s)")


logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_of_end(record))


class EventDrivenServer(uvicorn.Server):
    """Wakes once a second, where uvicorn polls ten times a second: most of the cost of an idle rank.

    Args:
        app: the ASGI application.
        upgrades: the handlers of upgraded connections.
        accepted: connections of the port that were accepted before, from which no byte has been read.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, app: Any, upgrades: ConnectionHandlers, accepted: Sequence[socket.socket] = ()) -> None:
        self._accepted = accepted
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol_with(upgrades) if upgrades else "auto",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                server_header=False,
                proxy_headers=False,
                backlog=_ACCEPTED_AT_ONCE,
            )
        )
        self.config.load()  # here rather than in the event loop, as it imports modules

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, the connections that were accepted before first."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # what asyncio has set is also how many it accepts before it serves others
        config, loop = self.config, asyncio.get_running_loop()
        for sock in self._accepted:
            await loop.connect_accepted_socket(
                lambda: config.http_protocol_class(  # type: ignore[call-arg]  # the same as uvicorn's own call
                    config=config, server_state=self.server_state, app_state=self.lifespan.state
                ),
                sock,
            )

    def end(self) -> None:
        """Finish the requests under way, then return from ``run``. For other threads."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)

    def run_soon(self, work: Coroutine[Any, Any, None], timeout: float) -> bool:
        """Run a coroutine in the event loop and wait for it, ``timeout`` seconds at most. For other threads.

        Returns:
            Whether the loop took it.
        """
        if self._loop is None or self._loop.is_closed():
            return False
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        return True

    def close_in_child(self) -> None:
        """Close the connections in a forked child; the parent's stay open."""
        sockets = [connection.transport.get_extra_info("socket") for connection in self.server_state.connections]
        detach(sock.fileno() for sock in sockets)

    async def main_loop(self) -> None:
        """Serve until ``end`` is called."""
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._log_exception)
        while not await self.on_tick(0):  # 0: update the date at every tick
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK_SECONDS)

    def _log_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception in a callback; without free descriptors, one line a minute in place of a traceback a second.

        A second after it had no free descriptor, asyncio listens again: also to a socket that was closed meanwhile.
        """
        error = context.get("exception")
        if error is not None and is_exhausted(error):
            warn_exhausted("a client of the HTTP port waits", error)
        elif not (self.should_exit and isinstance(error, ValueError) and "file descriptor" in str(error)):
            loop.default_exception_handler(context)


class LazyApplication:
    """ASGI application that is created at its first request, in a thread.

    Args:
        make_app: creates it.
    """

    def __init__(self, make_app: Callable[[], Application]) -> None:
        self._make_app = make_app
        self._app: asyncio.Future[Application] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward a request, and the shutdown if there was one."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if self._app is None:
            self._app = asyncio.ensure_future(asyncio.to_thread(self._make_app))
        await asyncio.wait({self._app})
        await self._app.result()(scope, receive, send)

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        started = await receive()
        await send({"type": "lifespan.startup.complete"})
        events = iter((started, await receive()))
        if self._app is not None and self._app.done() and self._app.exception() is None:

            async def next_event() -> Message:
                return next(events)

            async def forward(message: Message) -> None:
                if message["type"].startswith("lifespan.shutdown"):
                    await send(message)

            await self._app.result()(scope, next_event, forward)
        else:
            await send({"type": "lifespan.shutdown.complete"})


def _protocol_with(upgrades: ConnectionHandlers) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol class, extended to give connections that begin with an upgrade to their handler."""

    class UpgradingProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # the base depends on what is installed
        _head: bytes | None = b""

        def data_received(self, data: bytes) -> None:
            if self._head is None:
                super().data_received(data)
                return
            self._head += data
            matches = {upgrade.is_requested(self._head): handler for upgrade, handler in upgrades.items()}
            if True not in matches and None in matches:
                return  # too little of the head has come to decide
            head, self._head = self._head, None
            if True not in matches:
                super().data_received(head)
                return
            try:
                sock = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
            finally:
                self.transport.abort()  # closes uvicorn's descriptor, not the connection
            matches[True](sock)

    return UpgradingProtocol
