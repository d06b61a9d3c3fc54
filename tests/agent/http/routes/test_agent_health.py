"""Health, without a token."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_token(client):
    del client.headers["Authorization"]


async def test_health(client):
    answer = await client.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "service": "rankmesh-agent",
        "rank": 1,
        "world_size": 4,
        "version": "0.1.0",
        "reasons": [],
    }


async def test_failing_health_says_why_to_clients_with_the_token(client, agent):
    agent.reasons = ["group 'world': rank 2 (host 'node-3', pid 318) failed"]
    answer = await client.get("/health")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
    assert (answer.json()["status"], answer.json()["reasons"]) == (
        "failing",
        ["a group has failed; the reasons need the job's token"],
    )
    answer = await client.get("/health", headers={"Authorization": "Bearer secret"})
    assert (answer.status_code, answer.json()["reasons"]) == (503, agent.reasons)


async def test_ready_and_not_and_alive_all_the_same(client, agent):
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ok": True})
    agent.is_ready, agent.reasons = False, ["everything"]
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert answer.json()["code"] == "not-ready"
    answer = await client.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"ok": True})
