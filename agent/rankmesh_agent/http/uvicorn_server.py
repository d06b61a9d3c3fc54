"""Uvicorn for a thread of a rank: its main loop waits for an event, and connections may be those of other services.

The time of clients for heads and bodies is limited, and so is the number of connections that wait for their clients.
With services, the application is created at the first request: their connections need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import uvicorn

from rankmesh_agent.http.acceptor import HEAD_SECONDS, Services
from rankmesh_agent.http.middleware import Application, Message, Receive, Send
from rankmesh_agent.http.same_user import SameUserMiddleware
from rankmesh_agent.http.uvicorn_protocol import LimitedProtocol, ProtocolFactories, protocol_with
from rankmesh_agent.net.addresses import peer_name
from rankmesh_agent.net.admission import UNAUTHENTICATED, Admission
from rankmesh_agent.net.descriptors import is_exhausted, warn_exhausted
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.peer_credentials import warn_refused
from rankmesh_agent.net.tls import RECORD, refuse_plain, refuse_tls
from rankmesh_agent.net.tls_socket import is_of_another_token
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.hello import PREFACE_BYTES, is_preface

_KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection is kept: ranks of a large job send a heartbeat in some tens of seconds."""
_ACCEPT_RETRY_SECONDS = 0.05
_FULL_SECONDS = 0.001
_START_SECONDS = 0.01
"""Interval of looking for the rest of a PREFACE, of which only a part has come."""
_TICK_SECONDS = 1.0
"""Interval of uvicorn's periodic work, which sets the Date header of responses, and of looks at late clients."""


def _is_of_end(record: logging.LogRecord) -> bool:
    """Return whether a record reports a request that is cancelled because it goes on after the server's end."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return cancelled or str(record.msg).startswith("Cancel %s running task(s)")


def _is_of_client(record: logging.LogRecord) -> bool:
    """Return whether a record reports an invalid request: a client could fill the log with them."""
    return str(record.msg).startswith(("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket"))


logging.getLogger("uvicorn.error").addFilter(lambda record: not (_is_of_end(record) or _is_of_client(record)))


class EventDrivenServer(uvicorn.Server):
    """Wakes once a second, where uvicorn polls ten times a second: most of the cost of an idle rank.

    Args:
        app: the ASGI application.
        services: the services at the port, besides HTTP.
        accepted: connections of the port that were accepted before, from which no byte has been read.
        tls: returns the context for a client that uses TLS; None if there is none.
        tls_only: whether all other clients must use it, except for those of ``protocols``.
        same_user: whether to serve the processes of this user and of root alone.
        protocols: the protocols of connections that are not HTTP, see ProtocolFactories.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _made: ssl.SSLContext | None

    def __init__(
        self,
        app: Any,
        services: Services,
        accepted: Sequence[socket.socket] = (),
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        *,
        tls_only: bool = False,
        same_user: bool = False,
        protocols: ProtocolFactories = MappingProxyType({}),
    ) -> None:
        self._accepted = accepted
        self._services = services
        self._tls, self._made = tls, None
        self._plain_firsts = {preface[:1] for preface in protocols} if tls_only else None
        self._connecting: set[asyncio.Task[None]] = set()
        super().__init__(
            uvicorn.Config(
                SameUserMiddleware(app) if same_user else app,
                http=protocol_with(same_user, protocols),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                server_header=False,
                proxy_headers=False,
            )
        )
        self.config.load()  # here rather than in the event loop, as it imports modules

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, the connections that were accepted before first."""
        await super().startup([])  # it would accept connections whatever their number
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for sock in self._accepted:
            self._begin(sock)
        for listener in sockets or ():
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests under way, and close all connections."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for task in self._connecting:
            task.cancel()
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        """Accept some connections; between two calls, the loop serves those that it has."""
        for _ in range(UNAUTHENTICATED.batch):
            if not UNAUTHENTICATED.has_room():
                self._accept_later(listener, _FULL_SECONDS)
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if is_exhausted(error):
                    warn_exhausted("a client of the HTTP port waits", error)
                self._accept_later(listener, _ACCEPT_RETRY_SECONDS)
                return
            close_in_children(sock).setblocking(False)
            self._begin(sock)

    def _accept_later(self, listener: socket.socket, seconds: float) -> None:
        """Leave clients in the backlog for some time: an immediate retry would only spin."""
        assert self._loop is not None
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0 and not self.should_exit:
            assert self._loop is not None
            self._loop.add_reader(listener, self._accept, listener)

    def _begin(self, sock: socket.socket) -> None:
        """Serve a connection."""
        assert self._loop is not None
        admission = UNAUTHENTICATED.admit(sock)
        task = self._loop.create_task(self._connect(sock, admission))
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, sock, admission))

    async def _connect(self, sock: socket.socket, admission: Admission) -> None:
        def make_protocol() -> asyncio.Protocol:
            make: Any = self.config.http_protocol_class
            protocol: LimitedProtocol = make(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            protocol.admission = admission
            return protocol

        assert self._loop is not None
        start, context = await self._start_of(sock), None
        if is_preface(start):
            admission.end()
            self._services.serve(sock, start)
            return
        if start.startswith(RECORD):
            context = await self._context()
            if context is None:
                raise refuse_tls(sock)
        elif self._plain_firsts is not None and start[:1] not in self._plain_firsts:
            raise refuse_plain(sock) if start else ConnectionResetError
        limit = None if context is None else HEAD_SECONDS
        await self._loop.connect_accepted_socket(make_protocol, sock, ssl=context, ssl_handshake_timeout=limit)

    async def _context(self) -> ssl.SSLContext | None:
        """Return the context of TLS, which takes a moment to make."""
        if self._made is None:
            assert self._loop is not None
            self._made = await self._loop.run_in_executor(None, self._tls)
        return self._made

    async def _start_of(self, sock: socket.socket) -> bytes:
        """Return the first bytes of a connection, as many as a PREFACE has; they stay in the socket."""
        assert self._loop is not None
        arrived = asyncio.Event()
        self._loop.add_reader(sock, arrived.set)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                await arrived.wait()
                while (start := sock.recv(PREFACE_BYTES, socket.MSG_PEEK)) and is_preface(start) is None:
                    self._loop.remove_reader(sock)
                    await asyncio.sleep(_START_SECONDS)
            return start
        finally:
            self._loop.remove_reader(sock)

    def _connected(self, sock: socket.socket, admission: Admission, task: asyncio.Task[None]) -> None:
        """Close a connection that is not served: one that failed, or was cancelled, maybe before its task began."""
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and is_of_another_token(error):
            peer = peer_name(sock)
            warn_refused(AuthenticationError(f"the client at {peer} has another token than this service"))
        elif isinstance(error, ConnectionAbortedError):
            warn_refused(AuthenticationError(str(error)))
        if task.cancelled() or error is not None:
            admission.end()
            sock.close()
        # An OSError is a port scan, another authority's certificate, a client without TLS or without patience.
        if error is not None and not isinstance(error, OSError):
            task.get_loop().call_exception_handler({"message": "cannot serve a connection", "exception": error})

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

    async def main_loop(self) -> None:
        """Serve until ``end`` is called."""
        assert self._loop is not None
        self._loop.set_exception_handler(self._log_exception)
        while not await self.on_tick(0):  # 0: update the date at every tick
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK_SECONDS)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.close_if_late(now)  # type: ignore[union-attr]  # LimitedProtocol

    def _log_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception in a callback; if there is no free descriptor, one line a minute in place of tracebacks."""
        error = context.get("exception")
        if error is not None and is_exhausted(error):
            warn_exhausted("a client of the HTTP port is not served", error)
        else:
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
