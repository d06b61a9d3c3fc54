"""Standalone agents and leases over HTTP, through a real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict

import pytest

from rankmesh_gateway.http import handlers

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("wait", [0, -1, 0.01])
async def test_none_is_free_in_time(client, ask, wait):
    await client.post("/v1/agents", json=asdict(ask.agent(0, leased_to="pid 7 on host0")))
    refused = await client.post("/v1/leases", json=asdict(ask.lease(0, wait=wait)))
    assert (refused.status_code, refused.json()["code"]) == (503, "no-free-agent")
    assert "pid 7 on host0" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "1"


async def test_they_are_listed(client, ask):
    assert (await client.get("/v1/agents")).json() == []
    await client.post("/v1/agents", json=asdict(ask.agent(0)))
    (entry,) = (await client.get("/v1/agents")).json()
    assert (entry["state"], entry["agent"]) == ("free", asdict(ask.agent(0)))


@pytest.fixture
def looked_for(registry, monkeypatch) -> Counter[int]:
    """How often an agent was looked for, by rank."""
    looks: Counter[int] = Counter()
    offer = registry.agents.offer

    def count(request):
        looks[request.rank] += 1
        return offer(request)

    monkeypatch.setattr(registry.agents, "offer", count)
    return looks


async def test_many_wait_without_a_thread_each(client, ask, looked_for, eventually):
    await client.post("/v1/agents", json=asdict(ask.agent(0, leased_to="pid 7")))
    waiting = [asyncio.create_task(client.post("/v1/leases", json=asdict(ask.lease(rank, wait=20)))) for rank in (0, 1)]
    await asyncio.to_thread(eventually, lambda: len(looked_for) == 2)
    for number in range(2):
        await client.post("/v1/agents", json=asdict(ask.agent(number)))
    offers = [(await each).json()["agent"]["name"] for each in waiting]
    assert offers == ["agent-0", "agent-1"]


async def test_who_hangs_up_is_offered_nothing(client, raw_post, ask, looked_for, eventually, monkeypatch):
    monkeypatch.setattr(handlers, "_POLL_SECONDS", 20.0)
    await client.post("/v1/agents", json=asdict(ask.agent(0, leased_to="pid 7")))
    with raw_post("/v1/leases", ask.lease(0, wait=20)):
        await asyncio.to_thread(eventually, lambda: looked_for[0] == 1)
    await client.post("/v1/agents", json=asdict(ask.agent(0)))
    offer = await client.post("/v1/leases", json=asdict(ask.lease(1)))
    assert offer.json()["agent"]["name"] == "agent-0"


async def test_a_closed_registry_sends_askers_away(client, ask, registry, looked_for, eventually):
    await client.post("/v1/agents", json=asdict(ask.agent(0, leased_to="pid 7")))
    waiting = asyncio.create_task(client.post("/v1/leases", json=asdict(ask.lease(0, wait=20))))
    await asyncio.to_thread(eventually, lambda: looked_for[0] > 0)
    registry.close()
    late = client.post("/v1/agents", json=asdict(ask.agent(0)))
    for answer in (await waiting, await late):
        assert (answer.status_code, answer.json()["code"]) == (503, "gateway-closing")
        assert answer.headers["connection"] == "close"
