"""Uvicorn for a thread of a rank: its main loop waits for an event, and a port's acceptor gives it its connections.

Its protocol has limits of heads and of the connections that wait for their clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rankmesh_agent.http.acceptor import HEAD_SECONDS, Accepted
from rankmesh_agent.http.middleware import encode_problem, problem
from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.descriptors import DescriptorLimitError, is_exhausted, reason, warn_exhausted
from rankmesh_agent.net.peer_credentials import PeerRefusedError, check_peer, warn_refused
from rankmesh_agent.net.sockets import peer_name
from rankmesh_agent.net.tls import RECORD, refuse_plain, refuse_tls
from rankmesh_agent.net.tls_socket import is_of_another_token
from rankmesh_agent.wire.errors import AuthenticationError, DistError

MAX_HEAD_BYTES = 64 << 10
"""Limit of a request's head, and so of its URL."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # the base depends on what is installed
    """Uvicorn's protocol, with limits of heads and of the connections that wait for their clients.

    ``admission`` is the connection's place until its first request, and ``idle`` the limit of those that wait later.
    """

    cycle: Any
    transport: Any
    server_state: Any

    def __init__(self, admission: Admission, idle: ConnectionLimit, **options: Any) -> None:
        super().__init__(**options)
        self._admission = admission
        self._idle = idle
        self._head_bytes = 0
        self._deadline = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = time.monotonic() + HEAD_SECONDS
        self._admission.renew()  # it may have completed the handshake of TLS

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not cycle:
            self._head_bytes = 0
        elif self._head_bytes >= MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")  # httptools has no limit
        cycle = self.cycle
        if cycle is None or not cycle.response_complete:
            self._update_wait()
        elif self._deadline == math.inf:
            self._deadline = time.monotonic() + HEAD_SECONDS

    def on_message_complete(self) -> None:
        """Note the end of a body that the application did not read; called by httptools."""
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request with a problem document; end the connection in the middle of a response."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        if self._head_bytes >= MAX_HEAD_BYTES:
            text = f"the head of the request is over the limit of {MAX_HEAD_BYTES} bytes"
            refusal = problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", text)
        else:
            refusal = problem(HTTPStatus.BAD_REQUEST, "bad-request", "this is not an HTTP/1.1 request")
        headers, body = encode_problem(refusal)
        fields = (*headers, *self.server_state.default_headers, (b"connection", b"close"))
        start = f"HTTP/1.1 {refusal.status} {refusal.title}".encode()
        self.transport.write(b"\r\n".join([start, *(b": ".join(field) for field in fields), b"", body]))
        self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Close the connection if its client has not sent a whole head in time."""
        if now > self._deadline:
            self.transport.abort()

    def _update_wait(self) -> None:
        """Note whether the connection waits for its client; other than for a head, its time is limited elsewhere."""
        cycle = self.cycle
        if cycle is None or self.transport.is_closing():
            return
        self._admission.end()
        self._deadline = math.inf
        if cycle.response_complete or cycle.more_body:
            self._admission = self._idle.admit(self.transport.get_extra_info("socket"))


_KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection is kept: ranks of a large job send a heartbeat in some tens of seconds."""
_IDLE_SHARE, _MOST_IDLE = 4, 1 << 16
_TICK_SECONDS = 1.0
"""Interval of uvicorn's periodic work, which sets the Date header of responses, and of looks at late clients."""
_NOT_LOGGED = "Cancel %s running task(s)", "Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket"


def _is_logged(record: logging.LogRecord) -> bool:
    """Return False for a request that is cancelled at the server's end, or invalid: a client could fill the log."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not (cancelled or str(record.msg).startswith(_NOT_LOGGED))


logging.getLogger("uvicorn.error").addFilter(_is_logged)


class EventDrivenServer(uvicorn.Server):
    """Wakes once a second, where uvicorn polls ten times a second: most of the cost of an idle rank.

    Args:
        app, accepted, protocols: see HttpServer; ``take_accepted`` says that there are new connections.
        tls: returns the context for a client that uses TLS; None if there is none.
        tls_only: whether all other clients must use it, except for those of ``protocols``.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self,
        app: Any,
        accepted: deque[Accepted],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        *,
        tls_only: bool = False,
        same_user: bool = False,
        protocols: Mapping[bytes, Callable[[], asyncio.Protocol]] = MappingProxyType({}),
    ) -> None:
        self._accepted = accepted
        self._tls = cache(tls)  # a context takes a moment to make
        self._tls_only = tls_only
        self._same_user = same_user
        self._protocols = protocols
        self._idle = ConnectionLimit(
            "HTTP connections that wait for the next request, or for its body", _IDLE_SHARE, _MOST_IDLE
        )
        self._connecting: set[asyncio.Task[None]] = set()
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                server_header=False,
                proxy_headers=False,
            )
        )
        self.config.load()  # here rather than in the event loop, as it imports modules

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve the accepted connections; there are no listeners."""
        await super().startup([])
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._begin_accepted()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests under way, and close all connections."""
        for task in self._connecting:
            task.cancel()
        await super().shutdown([])

    def take_accepted(self) -> None:
        """Serve the connections that have been accepted. For other threads."""
        self._call_soon(self._begin_accepted)

    def _begin_accepted(self) -> None:
        assert self._loop is not None
        while self._accepted:
            accepted = self._accepted.popleft()
            task = self._loop.create_task(self._connect(accepted))
            self._connecting.add(task)
            task.add_done_callback(partial(self._connected, accepted))

    async def _connect(self, accepted: Accepted) -> None:
        assert self._loop is not None
        sock, start, admission = accepted
        make = next((make for preface, make in self._protocols.items() if start.startswith(preface)), None)
        if make is not None:
            admission.end()
            await self._loop.connect_accepted_socket(make, sock)
            return
        context, accepted_at = None, admission.since
        if start.startswith(RECORD):
            context = await self._loop.run_in_executor(None, self._tls)
            if context is None:
                raise refuse_tls(sock)
        elif self._tls_only:
            raise refuse_plain(sock)

        def make_http() -> asyncio.Protocol:
            return LimitedProtocol(
                admission,
                self._idle,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state | ({"refusal": _refusal(sock, accepted_at)} if self._same_user else {}),
            )

        limit = None if context is None else HEAD_SECONDS
        await self._loop.connect_accepted_socket(make_http, sock, ssl=context, ssl_handshake_timeout=limit)

    def _connected(self, accepted: Accepted, task: asyncio.Task[None]) -> None:
        """Close a connection that is not served: one that failed, or was cancelled, maybe before its task began."""
        self._connecting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and is_of_another_token(error):
            peer = peer_name(accepted.sock)
            warn_refused(AuthenticationError(f"the client at {peer} has another token than this service"))
        elif isinstance(error, ConnectionAbortedError):
            warn_refused(AuthenticationError(str(error)))
        if task.cancelled() or error is not None:
            accepted.admission.end()
            accepted.sock.close()
        # An OSError is a port scan, another authority's certificate, a client without TLS or without patience.
        if error is not None and not isinstance(error, OSError):
            task.get_loop().call_exception_handler({"message": "cannot serve a connection", "exception": error})

    def end(self) -> None:
        """Finish the requests under way, then return from ``run``. For other threads."""
        self.should_exit = True
        self._call_soon(lambda: self._stop.set())

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function)

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


def _refusal(sock: socket.socket, accepted_at: float) -> DistError | None:
    """Return why the requests of a connection are refused, None if they are not."""
    try:
        check_peer(sock, accepted_at)
    except PeerRefusedError as error:
        return error
    except OSError as error:
        return DescriptorLimitError(f"cannot determine the user of the client: {reason(error)}")
    return None
