"""An agent that says what a test tells it to say, and clients of its application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from support.views import FakeAgent

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.middleware import SecurityMiddleware


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    found = FakeAgent()
    yield found
    found.store.close()


class Current:
    """Stands for the agent of the test under way, so that one application serves them all."""

    def __init__(self) -> None:
        self.agent: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)


@pytest.fixture(scope="module")
def shared_app() -> tuple[Current, SecurityMiddleware]:
    """An application that wants the token 'secret', and which agent it shows: making one takes a while."""
    current = Current()
    return current, create_app(current, token="secret")


@pytest.fixture
async def client(shared_app, agent) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an application that wants the token 'secret', and gives it."""
    current, app = shared_app
    current.agent = agent
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as client:
        yield client
