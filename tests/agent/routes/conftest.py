"""An agent that says what a test tells it to say, and clients of its application."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from support.views import FakeAgent

from rankmesh_agent.app import create_app


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
async def client(agent) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an application that wants the token 'secret', and gives it."""
    transport = httpx.ASGITransport(create_app(agent, token="secret"), raise_app_exceptions=False)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as client:
        yield client
