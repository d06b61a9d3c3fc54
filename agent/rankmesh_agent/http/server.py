"""HTTP server of this process: a bound socket, and a daemon thread that serves an ASGI application on it.

Neither uvicorn nor the web framework is imported here: both load in the server's thread. Another thread accepts the
connections, and those that a service gets need neither.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from rankmesh_agent.config.settings import Settings, protection, require_token_beyond_loopback
from rankmesh_agent.config.tls import server_scheme, tls_settings
from rankmesh_agent.http.acceptor import Accepted, Acceptor
from rankmesh_agent.net import tls
from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.descriptors import is_exhausted, warn_exhausted
from rankmesh_agent.net.fork import import_lock
from rankmesh_agent.net.sockets import bind, interfaces, reachable_addresses, url_for, url_of
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.hello import Service

T = TypeVar("T")

_log = logging.getLogger("rankmesh")
_EXHAUSTED_RETRY_SECONDS = 0.5
_START_DESCRIPTORS = 6
"""Descriptors that the event loop and imports open at once, or more."""


def create_application(factory: Callable[[], T]) -> T:
    """Import a web framework and create an application, one at a time in this process.

    FastAPI and pydantic silence warnings while they are imported, and ``warnings.catch_warnings`` is not thread-safe.
    """
    with import_lock:
        return factory()


class ConnectionHandler(Protocol):
    """Server of the connections that begin with the PREFACE of a service."""

    def handle(self, sock: socket.socket, admission: Admission) -> None:
        """Serve a connection; end its admission when the client is accepted, or before the close. From any thread."""

    def close(self) -> None:
        """Close all connections."""


class HttpServer:
    """An HTTP port, bound when this object is created, and served from ``start`` to ``close``.

    Args:
        listener: a listening socket; this object closes it.
        name: name of the thread; one with the port if empty.
        token: the job's token, or all credentials. Without one, only this user's processes and root's are served.
        host: the address that the socket was bound to; the socket's own if empty.
        advertise: addresses to use in place of this machine's.

    Attributes:
        failure: why it cannot serve, as text: a package that it needs cannot be imported, say. '' if it can.

    Raises:
        ValueError: this process's TLS settings are invalid.
    """

    def __init__(
        self,
        listener: socket.socket,
        name: str = "",
        *,
        token: str | Credentials = "",
        host: str = "",
        advertise: tuple[str, ...] = (),
    ) -> None:
        self._tls = tls_settings()
        if self._tls.enabled:
            tls.server_context(self._tls)
        address, self.port = listener.getsockname()[:2]
        self._listener = listener
        self._url = url_of(listener)  # a server that fails closes it
        self._name = name or f"rankmesh-http-{self.port}"
        self._credentials = Credentials.of(token)
        self._host = host or address
        self._advertise = advertise
        self._services: Mapping[Service, ConnectionHandler] = {}
        self._listeners = [listener]
        self._protocols: Mapping[bytes, Any] = {}
        self._accepted: deque[Accepted] = deque()
        self._threads: list[threading.Thread] = []
        self._uvicorn: Any = None
        self._stopping = False
        self._on_failure: Callable[[], object] = lambda: None
        self.failure = ""

    @classmethod
    def bind(cls, settings: Settings, host: str, port: int = 0) -> HttpServer:
        """Bind a port of an agent; 0 for any free one.

        Raises:
            ValueError: other hosts could reach the port, and there is no token.
            AddressInUseError: another process listens there.
        """
        require_token_beyond_loopback(host, settings.token, "the agent")
        listener = bind(host, port, purpose="the agent serves HTTP")
        return cls(listener, token=settings.credentials, host=host, advertise=settings.advertise)

    @cached_property
    def _reachable(self) -> tuple[list[str], list[str]]:
        return reachable_addresses(self._host, self._advertise)

    @property
    def addresses(self) -> list[str]:
        """The addresses under which other processes can reach this one, in the order in which to try them."""
        return self._reachable[0]

    @property
    def names(self) -> list[str]:
        """The host names that a request's Host header may have."""
        return self._reachable[1]

    @cached_property
    def urls(self) -> list[str]:
        """Base URLs, one per address."""
        return [self.url(address) for address in self.addresses]

    def url(self, address: str = "") -> str:
        """Return the base URL under an address; under the socket's own if empty."""
        return url_for(address, self.port, server_scheme()) if address else self._url

    def start(
        self,
        make_app: Callable[[], Any],
        services: Mapping[Service, ConnectionHandler] = MappingProxyType({}),
        *,
        unix_listeners: Sequence[socket.socket] = (),
        protocols: Mapping[bytes, Any] = MappingProxyType({}),
        on_demand: bool = False,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to serve.

        Args:
            make_app: creates the ASGI application; called in a thread, so that importing the web framework does not
                delay the caller. The framework takes more memory and time to load than all the rest of a rank.
            services: the handlers of connections that begin with a PREFACE; closed with the server.
            unix_listeners: listening unix sockets for clients of the services; closed with the server.
            protocols: make the asyncio protocols of connections that are not HTTP, by their first bytes.
            on_demand: load the server and the application when the first client comes that is not a service's: most
                ranks have none. The client waits meanwhile.
            on_failure: called in the server's thread once ``failure`` is set.
        """
        self._services = services
        self._listeners = [self._listener, *unix_listeners]
        self._protocols = protocols
        self._on_failure = on_failure
        _log.info("%s: %s", self._url, protection(self._credentials.run))
        serving = threading.Thread(target=self._run, args=(make_app,), name=self._name, daemon=True)

        def forward(accepted: Accepted) -> None:
            if serving.ident is None:
                serving.start()
            self._accepted.append(accepted)
            if self._uvicorn is not None:
                self._uvicorn.take_accepted()

        handlers = {service: handler.handle for service, handler in services.items()}
        self._acceptor = Acceptor(self._listener, unix_listeners, handlers, protocols, forward)
        accepting = threading.Thread(target=self._accept, name=f"{self._name}-accept", daemon=True)
        self._threads = [accepting, serving]
        if not on_demand:
            serving.start()
        accepting.start()

    def close(self, timeout: float = 5.0) -> None:
        """Finish the requests under way, then close. Does nothing the second time."""
        self._stopping = True
        self._stop_accepting()
        if self._uvicorn is not None:
            self._uvicorn.end()
        for handler in self._services.values():
            handler.close()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout)
        self._close_listeners()

    def _stop_accepting(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _accept(self) -> None:
        try:
            self._acceptor.run()
        finally:
            self._close_listeners()
            if self.failure or self._stopping:
                self._drop_accepted()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()  # resets the connections that wait in its queue

    def _drop_accepted(self) -> None:
        while self._accepted:
            accepted = self._accepted.popleft()
            accepted.admission.end()
            accepted.sock.close()

    def _run(self, make_app: Callable[[], Any]) -> None:
        try:
            while not self._stopping:
                try:
                    self._check_descriptors()
                    self._serve(make_app)
                    break
                except OSError as error:
                    if not is_exhausted(error):
                        raise
                    warn_exhausted("the HTTP server waits", error)
                    time.sleep(_EXHAUSTED_RETRY_SECONDS)  # the clients wait, too
        except Exception as error:  # of a package, most likely
            if not self._stopping:
                hint = (
                    " ('pip check' names packages that do not fit together)" if isinstance(error, ImportError) else ""
                )
                self.failure = f"{type(error).__name__}: {error}{hint}"
                _log.error("%s cannot be served any more: %s", self._name, self.failure, exc_info=True)
                self._on_failure()
        finally:
            self._stop_accepting()
            self._drop_accepted()

    def _check_descriptors(self) -> None:
        """Raise OSError unless the server's start has free descriptors: asyncio cannot undo one that has not."""
        with contextlib.ExitStack() as opened:
            for _ in range(_START_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _tls_context(self) -> ssl.SSLContext | None:
        """Return the context for a client that uses TLS; None if this process has neither certificates nor a token."""
        names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *self.names, *self.addresses]
        names += [each.address for each in interfaces()]
        return tls.server_context(self._tls, self._credentials, tuple(dict.fromkeys(names)))

    def _serve(self, make_app: Callable[[], Any]) -> None:
        """Load the HTTP server and the application, and serve until it ends."""
        app = create_application(make_app)
        with import_lock:
            from rankmesh_agent.http.uvicorn_server import EventDrivenServer

            self._uvicorn = EventDrivenServer(
                app,
                self._accepted,
                self._tls_context,
                tls_only=bool(self._tls.cert),
                same_user=not self._credentials,
                protocols=self._protocols,
            )
        if not self._stopping:
            self._uvicorn.run(sockets=[])
