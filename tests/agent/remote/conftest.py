"""Standalone agents in this process, and processes attached to them, played by threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.attached import TOKEN

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.standalone import Standalone
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.state.registry import Registry


@pytest.fixture(scope="module")
def gateway_url() -> Iterator[str]:
    registry = Registry()
    listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")
    server = HttpServer(listener, "gateway")
    server.start(lambda: create_app(registry, token=TOKEN))
    yield url_of(listener)
    registry.close()
    server.close()


@pytest.fixture(scope="module")
def standalones(gateway_url: str) -> Iterator[list[Standalone]]:
    """Three agents."""
    made = []
    for number in range(3):
        agent = Standalone(Settings(token=TOKEN), lambda: gateway_url, host="127.0.0.1", name=f"agent-{number}")
        agent.start()
        made.append(agent)
    yield made
    for agent in made:
        agent.close()
