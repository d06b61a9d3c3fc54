"""Standalone agents in this process, and processes attached to them, played by threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.attached import TOKEN, gateway

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.standalone import Standalone
from rankmesh_gateway.state.registry import Registry


@pytest.fixture(scope="module")
def gateway_url() -> Iterator[str]:
    with gateway(Registry()) as url:
        yield url


@pytest.fixture(scope="module")
def standalones(gateway_url: str) -> Iterator[list[Standalone]]:
    """Three agents."""
    agents = [
        Standalone(Settings(token=TOKEN), lambda: gateway_url, host="127.0.0.1", name=f"agent-{number}")
        for number in range(3)
    ]
    for agent in agents:
        agent.start()
    yield agents
    for agent in agents:
        agent.close()
