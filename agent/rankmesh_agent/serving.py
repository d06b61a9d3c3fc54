"""An HTTP application served from a daemon thread of the process it belongs to."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from rankmesh_agent.wire.making import making
from rankmesh_agent.wire.sockets import bind, url_of

__all__ = ["HttpThread", "bind", "url_of"]


class HttpThread:
    """Serves an ASGI application on a bound socket until stopped.

    Args:
        make_app: called in the thread, so that importing the web framework does not hold up the caller.
        listener: a listening socket; this object closes it.
        name: the thread's name.
        when_asked: wait for the first client before making the application. The web framework takes more memory and
            time to load than all the rest of a rank, and most ranks are never asked; a client that comes waits in the
            socket's queue meanwhile.
    """

    def __init__(
        self, make_app: Callable[[], Any], listener: socket.socket, name: str, *, when_asked: bool = False
    ) -> None:
        self._make_app = make_app
        self._listener = listener
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
            self._server.should_exit = True
        else:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread if it waits for a client
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._listener.close()

    def forget(self) -> None:
        """In a forked child: let go of the parent's listening socket."""
        self._listener.close()

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

        with making():
            app = self._make_app()
        config = uvicorn.Config(
            app, lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=2, server_header=False
        )
        self._server = uvicorn.Server(config)
        if not self._stopping:
            self._server.run(sockets=[self._listener])
