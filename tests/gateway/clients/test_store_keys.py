"""What is in the jobs' stores, asked of those that own them."""

from __future__ import annotations

from typing import Any

import pytest
from support import agent_doubles as doubles

from rankmesh_gateway.clients import store_keys as stores_module
from rankmesh_gateway.clients.agent_client import AgentClient
from rankmesh_gateway.clients.store_keys import SHOWN_NAMES, StoreKeyCache
from rankmesh_gateway.schemas import JobStore

pytestmark = pytest.mark.anyio


def keys(method: str, path: str, document: Any) -> doubles.Answer:
    return 200, {"value": 3} if method == "POST" else ["a", "b", "c"]


@pytest.fixture
def stores(registry, ask, agents, monkeypatch) -> StoreKeyCache:
    monkeypatch.setattr(stores_module, "_ANSWER_SECONDS", 30.0)
    monkeypatch.setattr(stores_module, "_EVERY_SECONDS", 60.0)
    agents.plays |= dict.fromkeys((0, 1), keys)
    for rank in range(2):
        sign = ask.heartbeat(rank)
        sign.member.http = agents.url(rank)
        registry.heartbeat(sign)
    return StoreKeyCache(registry, AgentClient())


async def test_the_owner_is_asked(stores, agents):
    await stores.refresh()
    assert stores.known() == [JobStore("job", 3, ["a", "b", "c"])]
    assert {(rank, method, path) for rank, method, path, _ in agents.asked} == {
        (0, "POST", "/v1/store/count"),
        (0, "GET", "/v1/store"),
    }


async def test_not_more_often_than_needed(stores, agents):
    for _ in range(5):
        await stores.refresh()
    assert len(agents.asked) == 2


async def test_only_some_names_are_kept(stores, agents):
    agents.plays[0] = lambda method, path, document: (
        200,
        {"value": 999} if method == "POST" else [str(number) for number in range(999)],
    )
    await stores.refresh()
    (store,) = stores.known()
    assert (store.keys, len(store.names)) == (999, SHOWN_NAMES)


async def test_an_owner_that_does_not_answer_leaves_what_was_known(stores, agents, monkeypatch):
    monkeypatch.setattr(stores_module, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(stores_module, "_ANSWER_SECONDS", 0.3)
    agents.plays[0] = doubles.silent
    await stores.refresh()
    await stores._refreshing
    assert stores.known() == []
    monkeypatch.setattr(stores_module, "_ANSWER_SECONDS", 30.0)
    agents.plays[0] = keys
    await stores.refresh()
    agents.plays[0] = doubles.problem(503, "not-ready", "no")
    await stores.refresh()
    assert stores.known() == [JobStore("job", 3, ["a", "b", "c"])]


async def test_a_job_that_is_over_has_none(stores, registry, ask, monkeypatch):
    monkeypatch.setattr(stores_module, "_EVERY_SECONDS", 0.0)
    await stores.refresh()
    registry.leave(ask.leave(0))
    await stores.refresh()
    assert stores.known() == [JobStore("job", 3, ["a", "b", "c"])], "rank 1 has the store now, or its owner's address"
    registry.leave(ask.leave(1))
    await stores.refresh()
    assert stores.known() == []
