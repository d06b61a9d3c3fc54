"""The application as a whole: limits of bodies, what errors look like, the shutdown; test_guarded has the access."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest
from support.served_store import ServedStore

from rankmesh_agent.http.app import create_app

pytestmark = pytest.mark.anyio

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
def agent() -> Iterator[SimpleNamespace]:
    store = ServedStore()
    yield SimpleNamespace(store=store, groups=list)
    store.close()


@pytest.fixture
async def client(agent) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(agent, token="secret", names=["trainer-1"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


def check_problem(answer: httpx.Response, status: int, code: str) -> str:
    """Check that the answer is this problem; return its detail."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.json()["status"], answer.json()["code"]) == (status, code)
    return answer.json()["detail"]


class TestProblems:
    async def test_a_slash_at_the_end_is_another_path(self, client):
        check_problem(await client.get("/v1/groups/", headers=TOKEN), 404, "not-found")

    async def test_a_bug_keeps_its_internals(self, client, agent):
        def groups():
            raise ZeroDivisionError("the secret is 42")

        agent.groups = groups
        answer = await client.get("/v1/groups", headers=TOKEN)
        assert "ZeroDivisionError" in check_problem(answer, 500, "internal-error")
        assert "42" not in answer.text
