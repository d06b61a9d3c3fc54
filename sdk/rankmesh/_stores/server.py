"""A store that this process serves: over the fast path, and over HTTP."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.store.blocking import BlockingMemoryStore
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError

_WHAT = "the TCPStore serves its keys"


class TCPStoreServer:
    """A store at an address, for as long as somebody in this process uses it.

    Args:
        listener: a listening socket; this object closes it.
        settings: what the environment says.
        host: a name under which it may be asked.

    Attributes:
        port: where it listens.
    """

    def __init__(self, listener: socket.socket, settings: Settings, host: str) -> None:
        self.port: int = listener.getsockname()[1]
        self._store = MemoryStore()
        self._users = 0
        self._http = HttpServer(listener, f"rankmesh-store-{self.port}", advertise=settings.advertise)

        def make() -> Any:
            from rankmesh_agent.http.app import create_store_app

            return create_store_app(self._store, token=settings.token, names=[host, *self._http.names])

        store_server = StoreServer(self._store.table, settings.token, f"rankmesh-store-fast-{self.port}")
        self._http.start(make, {store_frames.UPGRADE: store_server})

    def use(self) -> ServerReference:
        """Return the store for one more user, to be closed."""
        with _lock:
            self._users += 1
            _running.add(self)
        return ServerReference(self)

    def leave(self) -> None:
        """One user less; the last one ends the service."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            _running.discard(self)
            for place in [place for place, server in _shared.items() if server is self]:
                del _shared[place]
        self._store.cancel_waits()
        self._http.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's listening socket."""
        self._http.close_in_child()


class ServerReference(BlockingMemoryStore):
    """The keys of a server in this process.

    Args:
        server: the server.
    """

    def __init__(self, server: TCPStoreServer) -> None:
        super().__init__(server._store.table)
        self.server = server

    def close(self) -> None:
        self.server.leave()


def serve(host: str, port: int, settings: Settings, *, shared: bool, descriptor: int | None) -> ServerReference:
    """Return a store that is served at an address.

    Args:
        host: name or address to listen on.
        port: port to listen on, 0 for any free one.
        settings: what the environment says.
        shared: whether to use a server that this process has there, and to let others use this one.
        descriptor: a bound socket to listen on instead; the server closes it.

    Raises:
        ValueError: it would listen beyond loopback without a token.
        AddressInUseError: somebody else listens there.
        DistStoreError: the descriptor's socket is bound to another port.
        DistNetworkError: it cannot listen there, or the descriptor is no socket.
    """
    with _lock:
        server = _shared.get((host, port)) if shared else None
        if server is None:
            server = TCPStoreServer(_listener(host, port, settings, descriptor), settings, host)
            if shared:
                _shared[host, server.port] = server
        return server.use()


def _listener(host: str, port: int, settings: Settings, descriptor: int | None) -> socket.socket:
    if descriptor is None:
        address = settings.bind or host
        require_token_beyond_loopback(address, settings.token, "the TCPStore")
        return bind(address, port, purpose=_WHAT)
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise DistNetworkError(f"master_listen_fd={descriptor} is not a socket: {error.strerror}") from error
    try:
        if listener.type != socket.SOCK_STREAM or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise DistNetworkError(f"master_listen_fd={descriptor} is not a TCP socket")
        bound, there = listener.getsockname()[:2]
        if there == 0 or port not in (0, there):
            raise DistStoreError(
                f"master_listen_fd={descriptor} is bound to port {there}, but port={port} was asked for"
            )
        require_token_beyond_loopback(bound, settings.token, "the TCPStore")
        listener.listen(1024)
    except BaseException as error:
        listener.detach()  # it stays the caller's
        if isinstance(error, OSError):
            raise DistNetworkError(f"cannot listen on master_listen_fd={descriptor}: {error.strerror}") from error
        raise
    return listener


_shared: dict[tuple[str, int], TCPStoreServer] = {}
_running: set[TCPStoreServer] = set()
_lock = threading.RLock()  # a store may be collected, and so its server left, at any time


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for server in _running:
        server.close_in_child()
    _running.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
