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


@pytest.fixture
def owner(owned) -> Iterator[str]:
    """The URL of the agent that owns ``owned``."""
    listener = bind("127.0.0.1", 0, what="test")
    url = url_of(listener)
    server = HttpThread(lambda: create_app(SimpleNamespace(store=owned), token="secret"), listener, "owner")
    server.start()
    yield url
    server.stop()
