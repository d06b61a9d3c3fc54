"""An HTTP application served from a daemon thread of the process it belongs to."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from rankmesh_agent.http.construction import making
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.upgrade import Upgrade

if TYPE_CHECKING:
    import asyncio

__all__ = ["HttpThread", "Taker", "bind", "url_of"]

_RUN_SECONDS = 2.0
"""How long the event loop may take for what another thread has it do."""


class Taker(Protocol):
    """Who serves the connections that begin with an upgrade to another protocol."""

    def take(self, sock: socket.socket) -> None:
        """Serve a connection. From any thread."""

    def close(self) -> None:
        """Close all connections."""

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors."""


class HttpThread:
    """Serves an ASGI application on a bound socket until stopped.

    Args:
        make_app: called in the thread, so that importing the web framework does not hold up the caller.
        listener: a listening socket; this object closes it.
        name: the thread's name.
        when_asked: wait for the first client before making the application. The web framework takes more memory and
            time to load than all the rest of a rank, and most ranks are never asked; a client that comes waits in the
            socket's queue meanwhile.
        ways: who serves the connections whose clients ask for another protocol; they end with this.
    """

    def __init__(
        self,
        make_app: Callable[[], Any],
        listener: socket.socket,
        name: str,
        *,
        when_asked: bool = False,
        ways: Mapping[Upgrade, Taker] = MappingProxyType({}),
    ) -> None:
        self._make_app = make_app
        self._listener = listener
        self._ways = ways
        self._server: Any = None
        self._stopping = False
        self._when_asked = when_asked
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Finish the requests under way, then close. Does nothing the second time."""
        self._stopping = True
        if self._server is not None:
            self._server.end()
        else:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread if it waits for a client
        for taker in self._ways.values():
            taker.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        # Where it still loads what it serves with, it closes the listener itself: without one it would fail to start.
        if not self._thread.is_alive():
            self._listener.close()

    def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Have the event loop do something, and wait for that; return whether it was asked. For other threads."""
        return self._server is not None and bool(self._server.run_soon(work, _RUN_SECONDS))

    def forget(self) -> None:
        """In a forked child: let go of the parent's listening socket."""
        self._listener.close()
        for taker in self._ways.values():
            taker.forget()

    def _serve(self) -> None:
        try:
            if self._when_asked:
                self._wait_for_a_client()
            if not self._stopping:
                self._run()
        finally:
            self._listener.close()  # whoever waits in its queue learns that nobody will answer

    def _wait_for_a_client(self) -> None:
        """Sleep until somebody has connected, or it is time to stop."""
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        poll.poll()

    def _run(self) -> None:
        import uvicorn

        from rankmesh_agent.http.uvicorn_server import QuietServer

        with making():
            app = self._make_app()
        config = uvicorn.Config(
            app,
            http=_with_ways(self._ways) if self._ways else "auto",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        self._server = QuietServer(config)
        if not self._stopping:
            self._server.run(sockets=[self._listener])


def _with_ways(ways: Mapping[Upgrade, Taker]) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, but for connections that begin with an upgrade to another: those it gives away."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Doorway(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # which class it is depends on what is installed
        _head: bytes | None = b""

        def data_received(self, data: bytes) -> None:
            if self._head is None:
                super().data_received(data)
                return
            self._head += data
            asked = {way.asked_for(self._head): taker for way, taker in ways.items()}
            if True not in asked and None in asked:
                return
            head, self._head = self._head, None
            if True not in asked:
                super().data_received(head)
                return
            sock = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
            self.transport.abort()  # that closes uvicorn's descriptor, not the connection
            asked[True].take(sock)

    return Doorway
