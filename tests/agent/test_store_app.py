"""A store served on its own: the agent's endpoints for its store, and health, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest
from support.served_store import ServedStore

from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.store.commands import Set
from rankmesh_agent.wire.version import __version__

pytestmark = pytest.mark.anyio


async def get(app: Any, path: str) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        found: dict[str, Any] = (await client.get(path)).json()
    return found


async def test_health_is_open():
    with contextlib.closing(ServedStore()) as store:
        Set("k", b"v").apply(store.table)
        found = await get(create_store_app(store, token="secret"), "/health")
    assert found == {"status": "ok", "service": "rankmesh-store", "version": __version__, "keys": 1}


async def test_its_endpoints_are_the_agents():
    ours, agents = [
        (await get(app, "/openapi.json"))["paths"] for app in (create_store_app(ServedStore()), create_app(None))
    ]
    del ours["/health"]
    assert ours == {path: found for path, found in agents.items() if path.startswith("/v1/store")}
