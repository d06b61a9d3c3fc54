"""A store served on its own: the agent's endpoints for its store, and health, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from support.served_store import ServedStore

from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.store.commands import Set
from rankmesh_agent.wire.version import __version__

pytestmark = pytest.mark.anyio


@pytest.fixture
def store() -> Iterator[ServedStore]:
    found = ServedStore()
    yield found
    found.close()


@pytest.fixture
async def client(store) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_store_app(store, token="secret", names=["master"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://master:8000") as client:
        yield client


async def test_health_is_open(client, store):
    Set("k", b"v").apply(store.table)
    answer = await client.get("/health")
    assert answer.json() == {"status": "ok", "service": "rankmesh-store", "version": __version__, "keys": 1}


async def test_the_rest_wants_the_token(client, store):
    answer = await client.put("/v1/store/k", content=b"v")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    client.headers["Authorization"] = "Bearer secret"
    assert (await client.put("/v1/store/k", content=b"v")).status_code == 204
    assert store.table.keys() == ["k"]


async def test_its_endpoints_are_the_agents(client):
    async def paths(app) -> dict[str, object]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
            return (await asking.get("/openapi.json")).json()["paths"]

    ours, agents = await paths(create_store_app(ServedStore())), await paths(create_app(None))
    del ours["/health"]
    assert ours == {path: found for path, found in agents.items() if path.startswith("/v1/store")}


async def test_errors_are_problems(client):
    client.headers["Authorization"] = "Bearer secret"
    answer = await client.get("/v1/groups")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
