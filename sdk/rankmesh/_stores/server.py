"""Server of a TCPStore: the store's binary protocol and HTTP on one port."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from rankmesh_agent.config.settings import Settings, require_token_beyond_loopback
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.descriptors import convert_emfile, raise_limit
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import BACKLOG, bind, listen_unix
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.store import LocalStore
from rankmesh_agent.store.table import Quota, Table
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError
from rankmesh_agent.wire.hello import Service

_WHAT = "the TCPStore serves its keys"


class TCPStoreServer:
    """A store at an address, for as long as an object of this process refers to it; it closes the listening socket."""

    def __init__(self, listener: socket.socket, settings: Settings, host: str) -> None:
        self.port: int = listener.getsockname()[1]
        self.table = Table(Quota(settings.store_keys, settings.store_bytes))
        self._references = 0
        self._over_http: StoreClient | None = None
        name = f"rankmesh-store-{self.port}"
        unix_listener, unix_socket = listen_unix()
        self._http = HttpServer(listener, name, token=settings.credentials, advertise=settings.advertise)

        def make() -> Any:
            from rankmesh_agent.http.app import create_store_app

            self._over_http = StoreClient(self._http.url(), settings.token, unix_socket=unix_socket)
            return create_store_app(self._over_http, token=settings.credentials, names=[host, *self._http.names])

        server = StoreServer(self.table, settings.credentials, f"rankmesh-store-fast-{self.port}", unix_socket)
        self._http.start(make, {Service.STORE: server}, unix_listeners=[unix_listener], on_demand=True)

    def acquire(self) -> ServerReference:
        """Return one more reference to the store, to be closed."""
        with _lock:
            self._references += 1
            _running.add(self)
        return ServerReference(self)

    def release(self) -> None:
        """Drop a reference; the last one closes the server."""
        with _lock:
            self._references -= 1
            if self._references:
                return
            _running.discard(self)
            for address in [address for address, server in _shared.items() if server is self]:
                del _shared[address]
        self.table.close()
        if self._over_http is not None:
            self._over_http.close()
        self._http.close()


class ServerReference(LocalStore):
    """A counted reference to a server in this process, as a store of its keys."""

    def __init__(self, server: TCPStoreServer) -> None:
        super().__init__(server.table)
        self.server = server

    def close(self) -> None:
        self.server.release()


def serve(host: str, port: int, settings: Settings, *, shared: bool, descriptor: int | None) -> ServerReference:
    """Return a reference to a store that is served, ``shared`` with other masters of this process at its address."""
    raise_limit()
    with _lock, convert_emfile(f"cannot host a store at {host}:{port}"):
        server = _shared.get((host, port)) if shared else None
        if server is None:
            server = TCPStoreServer(_listener(host, port, settings, descriptor), settings, host)
            if shared:
                _shared[host, server.port] = server
        return server.acquire()


def _listener(host: str, port: int, settings: Settings, descriptor: int | None) -> socket.socket:
    if descriptor is None:
        address = settings.bind or host
        require_token_beyond_loopback(address, settings.token, "the TCPStore")
        return bind(address, port, purpose=_WHAT)
    try:
        listener = close_in_children(socket.socket(fileno=descriptor))
    except OSError as error:
        raise DistNetworkError(f"master_listen_fd={descriptor} is not a socket: {error.strerror}") from error
    try:
        if listener.type != socket.SOCK_STREAM or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise DistNetworkError(f"master_listen_fd={descriptor} is not a TCP socket")
        bound, actual = listener.getsockname()[:2]
        if actual == 0 or port not in (0, actual):
            raise DistStoreError(
                f"master_listen_fd={descriptor} is bound to port {actual}, but port={port} was requested"
            )
        require_token_beyond_loopback(bound, settings.token, "the TCPStore")
        listener.listen(BACKLOG)
    except BaseException as error:
        listener.detach()  # the caller keeps it
        if isinstance(error, OSError):
            raise DistNetworkError(f"cannot listen on master_listen_fd={descriptor}: {error.strerror}") from error
        raise
    return listener


_shared: dict[tuple[str, int], TCPStoreServer] = {}
_running: set[TCPStoreServer] = set()
_lock = threading.RLock()  # reentrant: the garbage collector may close a store at any time


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)
