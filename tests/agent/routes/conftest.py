"""An agent that says what a test tells it to say, and clients of its application."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from rankmesh_agent.app import create_app
from rankmesh_agent.store.base import Store
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.wire.schemas import AgentHealth, AgentInfo, GroupInfo, Member
from rankmesh_agent.wire.settings import Settings


class FakeAgent:
    """An AgentView."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.store: Store = MemoryStore()
        self.reasons: list[str] = []
        self.is_ready = True

    def health(self) -> AgentHealth:
        return AgentHealth("failing" if self.reasons else "ok", "rankmesh-agent", 1, 4, "0.1.0", self.reasons)

    def ready(self) -> bool:
        return self.is_ready

    def info(self) -> AgentInfo:
        member = Member(1, "i", "host", "h", 7, ["127.0.0.1:9000"], "http://127.0.0.1:8000")
        return AgentInfo("job", 1, 4, member, "http://127.0.0.1:29500", {"0": "segment"}, 1.5, "0.1.0")

    def groups(self) -> list[GroupInfo]:
        return [
            GroupInfo("00000000000000aa", "world", [0, 1, 2, 3], 3, "shm", "barrier #2", ""),
            GroupInfo("00000000000000bb", "pair", [1, 3], 0, "tcp", "", "rank 3 failed"),
        ]

    async def aclose(self) -> None:
        await self.store.close()


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
