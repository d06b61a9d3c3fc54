"""Health, without a token."""

from __future__ import annotations

import httpx
import pytest

from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.http.app import create_app

pytestmark = pytest.mark.anyio


@pytest.fixture
def transport(registry) -> httpx.ASGITransport:
    return httpx.ASGITransport(create_app(registry, token="secret"))


async def test_health_counts_live_ranks(transport, registry, ask):
    registry.join(ask.join(0))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "service": "rankmesh-gateway",
        "id": registry.id,
        "version": __version__,
        "jobs": 1,
        "ranks": 1,
    }


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
async def test_probes(transport, path):
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"ok": True})
