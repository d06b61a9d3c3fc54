"""A store that a server has, over HTTP and in the binary protocol, and a proxy before it that breaks connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, listen_unix, url_of
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import Add, Append, CompareSet, Delete, Get, MultiSet, Set
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.hello import Service


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[SimpleNamespace, str]]:
    """A port whose store can be exchanged, and its URL."""
    current: Any = SimpleNamespace(handle=lambda *accepted: current.server.handle(*accepted), close=lambda: None)
    listener = bind("127.0.0.1", 0, purpose="test")
    url = url_of(listener)
    running = HttpServer(listener, "stores")
    unix_listener, current.unix_socket = listen_unix()
    make = partial(create_app, current, token="secret")
    running.start(make, {Service.STORE: current}, unix_listeners=[unix_listener])
    current.limit = running._acceptor._limit
    yield current, url
    running.close()


@pytest.fixture
def store_server(table, server) -> Iterator[StoreServer]:
    """The server of ``table``."""
    found = StoreServer(table, "secret", unix_socket=server[0].unix_socket)
    yield found
    found.close()


@pytest.fixture
def url(server, store_server) -> Iterator[str]:
    """The URL of the server of ``table``."""
    current, found = server
    current.server = store_server
    current.store = StoreClient(found, "secret")
    yield found
    current.store.close()


@pytest.fixture
def store(url) -> Iterator[StoreClient]:
    with contextlib.closing(StoreClient(url, "secret")) as found:
        yield found


@pytest.fixture(
    params=[
        (Add("k", 4), 5, b"5"),
        (Append("k", b"0"), None, b"10"),
        (CompareSet("k", b"1", b"2"), b"2", b"2"),
        (Delete("k"), True, None),
        (Set("k", b"2"), None, b"2"),
        (MultiSet((("k", b"2"),)), None, b"2"),
        (Get("k"), b"1", b"1"),
    ],
    ids=lambda found: found[0].name,
)
def call(request) -> tuple[Command, Any, bytes | None]:
    """A command on a key that holds b"1", its result, and the key's value afterwards."""
    return request.param


@pytest.fixture
def losing(url) -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Opens a proxy before the server that ends connections instead of forwarding."""

    @contextlib.contextmanager
    def proxy(what: str = "answer", *, after: int = 1, times: int = 1) -> Iterator[str]:
        """The URL of a proxy.

        Args:
            what: ``request`` or ``answer``, what it does not forward.
            after: messages that it does forward before, of each connection: those of the handshake.
            times: number of connections that it ends.
        """
        target, left = urlsplit(url), [times]
        opened: list[socket.socket] = []
        running: list[threading.Thread] = []

        def forward(source: socket.socket, sink: socket.socket, name: str) -> None:
            count = 0
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    if name == what and count == after and left[0] > 0:
                        left[0] -= 1
                        break
                    count += 1
                    sink.sendall(data)
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = listener.accept()[0]
                    there = socket.create_connection((target.hostname, target.port), 10.0)
                    opened.extend((client, there))
                    for arguments in ((client, there, "request"), (there, client, "answer")):
                        running.append(threading.Thread(target=forward, args=arguments))
                        running[-1].start()

        listener = socket.create_server(("127.0.0.1", 0))
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield url_of(listener)
        finally:
            with listener:
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for sock in opened:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in running:
                thread.join()
            for sock in opened:
                sock.close()

    return proxy
