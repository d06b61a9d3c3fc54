"""A store that an agent serves, over HTTP and in the binary protocol, and a proxy before it that breaks connections."""

from __future__ import annotations

import asyncio
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
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.store.base import AsyncStore, BlockingStore
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import Add, Append, CompareSet, Delete, Get, MultiSet, Set
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.wire.store_frames import UPGRADE


@pytest.fixture
def owned() -> MemoryStore:
    return MemoryStore()


class Exchangeable(StoreServer):
    """Hands connections to the server of the agent's current store.

    Args:
        agent: the agent.
    """

    def __init__(self, agent: SimpleNamespace) -> None:
        super().__init__(MemoryStore().table, "")
        self._agent = agent

    def handle(self, sock: socket.socket) -> None:
        self._agent.store_server.handle(sock)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[SimpleNamespace, str]]:
    """An agent whose store can be exchanged, and its URL."""
    agent = SimpleNamespace(store=MemoryStore())
    listener = bind("127.0.0.1", 0, purpose="test")
    url = url_of(listener)
    app = partial(create_app, agent, token="secret")
    running = HttpServer(listener, "owner")
    running.start(app, {UPGRADE: Exchangeable(agent)})
    yield agent, url
    running.close()


@pytest.fixture
def store_server(owned) -> Iterator[StoreServer]:
    """The server of ``owned``."""
    found = StoreServer(owned.table, "secret")
    yield found
    found.close()


@pytest.fixture
def owner(server, owned, store_server) -> str:
    """The URL of the agent that owns ``owned``."""
    agent, url = server
    agent.store, agent.store_server = owned, store_server
    return url


class OnLoop(BlockingStore):
    """A store for callers with an event loop, which runs in a thread.

    Args:
        store: the store.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store, self._loop = store, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def execute(self, command: Command, idempotency_key: str = "") -> Any:
        return asyncio.run_coroutine_threadsafe(self._store.execute(command, idempotency_key), self._loop).result()

    def close_connections(self) -> None:
        asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()

    def close(self) -> None:
        self.close_connections()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def on_loop() -> type[OnLoop]:
    return OnLoop


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
def losing(owner) -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Opens a proxy before the owner that ends connections instead of forwarding."""

    @contextlib.contextmanager
    def proxy(what: str = "answer", *, after: int = 0, times: int = 1, port: int = 0) -> Iterator[str]:
        """The URL of a proxy.

        Args:
            what: ``request`` or ``answer``, what it does not forward.
            after: requests or answers that it does forward before, of each connection.
            times: number of connections that it ends.
            port: its port.
        """
        target, left = urlsplit(owner), [times]
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

        listener = socket.create_server(("127.0.0.1", port))
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
