"""Limits of what clients may leave in a store, and of requests without a right credential."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.processes import free_port

import rankmesh as dist
from rankmesh_agent.http import middleware
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import MultiSet, QueuePush, Set


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """A store of two keys and a hundred bytes."""
    monkeypatch.setenv("RANKMESH_STORE_KEYS", "2")
    monkeypatch.setenv("RANKMESH_STORE_BYTES", "100")
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    yield store
    store.close()


def test_a_store_refuses_what_exceeds_its_limits_on_every_road(store: dist.TCPStore) -> None:
    url = f"http://127.0.0.1:{store.port}"
    with contextlib.closing(StoreClient(url)) as client:
        with pytest.raises(dist.errors.StoreFullError, match=r"100.*RANKMESH_STORE_BYTES"):
            client.execute(Set("k", bytes(100)))
        with pytest.raises(dist.errors.StoreFullError, match=r"2.*RANKMESH_STORE_KEYS"):
            client.execute(MultiSet((("a", b""), ("b", b""), ("c", b""))))
        with pytest.raises(dist.errors.StoreFullError, match="RANKMESH_STORE_BYTES"):
            client.execute(QueuePush("q", bytes(100)))
    with pytest.raises(dist.errors.StoreFullError, match="RANKMESH_STORE_BYTES"):
        store.set("k", bytes(100))
    request = urllib.request.Request(f"{url}/v1/store/k", bytes(100), method="PUT")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 413
    assert b"store-full" in caught.value.read()
    assert store.num_keys() == 0


def test_a_full_store_serves_on_and_takes_more_after_a_removal(store: dist.TCPStore) -> None:
    store.set("a", bytes(40))
    store.queue_push("q", bytes(40))
    for write in (
        lambda: store.set("b", b""),
        lambda: store.queue_push("q", b""),
        lambda: store.append("a", bytes(40)),
    ):
        with pytest.raises(dist.errors.StoreFullError):
            write()
    store.set("a", bytes(50))  # in the place of the earlier value
    assert store.queue_pop("q") == bytes(40)
    store.set("b", bytes(40))
    assert store.delete_key("a")
    store.set("c", bytes(50))
    assert store.get("c") == bytes(50)


async def served(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.anyio
async def test_an_address_that_guesses_tokens_gets_429_and_others_go_on(monkeypatch, caplog) -> None:
    monkeypatch.setattr(middleware, "UNAUTHENTICATED_A_SECOND", 0)
    monkeypatch.setattr(middleware, "_UNAUTHENTICATED_AT_ONCE", 5)
    app = SecurityMiddleware(served, "secret")

    def client(address: str, token: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(app, client=(address, 1234))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async with (
        client("127.0.0.1", "guess") as guesser,
        client("127.0.0.1", "secret") as neighbour,
        client("127.0.0.2", "guess") as other,
    ):
        for rounds in range(10):
            assert (await guesser.get("/v1/info")).status_code == (401 if rounds < 5 else 429)
            assert (await neighbour.get("/v1/info")).status_code == 200
        answer = await guesser.get("/v1/info")
        assert (answer.json()["code"], answer.headers["retry-after"]) == ("too-many-attempts", "1")
        assert (await other.get("/v1/info")).status_code == 401
        assert (await guesser.get("/health")).status_code == 200
    # Another line, of a wrong token, is logged once a minute in this process.
    (line,) = [text for text in caplog.messages if "requests a second" in text]
    assert line.startswith("127.0.0.1 sends")


@pytest.mark.anyio
async def test_without_a_token_no_request_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(middleware, "_UNAUTHENTICATED_AT_ONCE", 0)
    transport = httpx.ASGITransport(SecurityMiddleware(served))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/v1/info")).status_code == 200
