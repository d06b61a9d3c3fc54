"""One store behind two agents: what is asked of the one that does not own it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.store.http_client import HttpStore

pytestmark = pytest.mark.anyio

TOKEN = {"Authorization": "Bearer secret"}
NAMED, NAMED2 = {"Idempotency-Key": "one"}, {"Idempotency-Key": "two"}


@pytest.fixture
def owner(agent) -> Iterator[HttpServer]:
    listener = bind("127.0.0.1", 0, purpose="test")
    server = HttpServer(listener, "owner")
    server.url = url_of(listener)
    server.start(lambda: create_app(agent, token="secret"))
    yield server
    server.close()


@pytest.fixture
async def forwarder(owner) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an agent that forwards to the owner."""
    store = HttpStore(owner.url, "secret")
    transport = httpx.ASGITransport(create_app(SimpleNamespace(store=store), token="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=TOKEN) as client:
        yield client
    await store.close()


async def test_both_show_the_same(owner, forwarder):
    await forwarder.put("/v1/store/a/b", content=b"\x00v")
    async with httpx.AsyncClient(base_url=owner.url, headers=TOKEN, timeout=30) as direct:
        assert (await direct.get("/v1/store/a/b")).content == b"\x00v"
        await direct.put("/v1/store/n", content=b"41")
    assert (await forwarder.post("/v1/store/add", json={"key": "n"})).json() == {"value": 42}
    assert (await forwarder.get("/v1/store")).json() == ["a/b", "n"]
    for answer in [await forwarder.post("/v1/store/add", json={"key": "n"}, headers=NAMED) for _ in range(2)]:
        assert answer.json() == {"value": 43}
    tag = (await forwarder.get("/v1/store/n")).headers["etag"]
    assert (await forwarder.put("/v1/store/n", content=b"1", headers={"If-Match": tag})).status_code == 204
    await forwarder.post("/v1/store/queue_push", params={"key": "q"}, content=b"1")
    for answer in [await forwarder.post("/v1/store/queue_pop", json={"key": "q"}, headers=NAMED2) for _ in range(2)]:
        assert answer.content == b"1"
    assert (await forwarder.delete("/v1/store/n")).status_code == 204
    assert (await forwarder.delete("/v1/store/n")).status_code == 404


async def test_both_refuse_alike(owner, forwarder):
    await forwarder.put("/v1/store/text", content=b"text")
    async with httpx.AsyncClient(base_url=owner.url, headers=TOKEN, timeout=30) as direct:
        for method, path, body in (
            ("GET", "none", None),
            ("DELETE", "none", None),
            ("GET", "", None),
            ("POST", "add", {"key": "text"}),
            ("POST", "wait", {"keys": ["text", "none"], "timeout": 0}),
            ("POST", "multi_get", {"keys": ["text", "none"], "timeout": 0}),
            ("POST", "queue_pop", {"key": "none"}),
        ):
            ours = await direct.request(method, f"/v1/store/{path}", json=body)
            theirs = await forwarder.request(method, f"/v1/store/{path}", json=body)
            assert ours.is_client_error
            assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())


async def test_waits_through_both_do_not_keep_out_who_sets(agent, forwarder):
    def waiting() -> int:
        return len(agent.store.table._watches.get("k", ()))

    async with asyncio.timeout(30.0):
        gets = [asyncio.create_task(forwarder.get("/v1/store/k", params={"wait": 20})) for _ in range(48)]
        while waiting() < 48:
            await asyncio.sleep(0.005)
        gets.pop().cancel()
        while waiting() > 47:
            await asyncio.sleep(0.005)
        assert (await forwarder.put("/v1/store/k", content=b"v")).status_code == 204
        assert [answer.content for answer in await asyncio.gather(*gets)] == [b"v"] * 47
    assert agent.store.table._watches == {}


async def test_an_owner_that_is_gone_is_named(owner, forwarder):
    owner.close()
    answer = await forwarder.get("/v1/store/k", params={"wait": 20})
    assert (answer.status_code, answer.json()["code"]) == (502, "network-error")
    assert answer.json()["address"] == owner.url
    assert owner.url in answer.json()["detail"]


async def test_an_owner_that_goes_while_others_wait_is_named(agent, owner, forwarder):
    waiting = asyncio.create_task(forwarder.get("/v1/store/k", params={"wait": 20}))
    async with asyncio.timeout(15.0):
        while not agent.store.table._watches:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(owner.close, 10.0)
        answer = await waiting
    assert (answer.status_code, answer.json()["address"]) == (502, owner.url)
    assert agent.store.table._watches == {}
