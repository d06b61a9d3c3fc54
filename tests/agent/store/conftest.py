"""A store that an agent serves, over HTTP and in the binary protocol."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
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
