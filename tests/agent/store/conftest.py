"""A store that an agent serves over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rankmesh_agent.app import create_app
from rankmesh_agent.serving import HttpThread, bind, url_of
from rankmesh_agent.store.memory import MemoryStore


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def owned() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[SimpleNamespace, str]]:
    """An agent whose store can be exchanged, and its URL."""
    agent = SimpleNamespace(store=MemoryStore())
    listener = bind("127.0.0.1", 0, what="test")
    url = url_of(listener)
    running = HttpThread(lambda: create_app(agent, token="secret"), listener, "owner")
    running.start()
    yield agent, url
    running.stop()


@pytest.fixture
def owner(server, owned) -> str:
    """The URL of the agent that owns ``owned``."""
    agent, url = server
    agent.store = owned
    return url
