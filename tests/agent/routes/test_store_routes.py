"""The store over HTTP: bodies, statuses, and how long requests are held."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from rankmesh_agent.app import create_app
from rankmesh_agent.serving import HttpThread, bind, url_of
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS

pytestmark = pytest.mark.anyio


def check_problem(answer, status: int, code: str) -> str:
    """Check that the answer is this problem; return its detail."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.json()["status"], answer.json()["code"]) == (status, code)
    return answer.json()["detail"]


class TestValues:
    async def test_a_life(self, client):
        answer = await client.put("/v1/store/a/b", content=b"\x00\xff")
        assert (answer.status_code, answer.content) == (204, b"")
        answer = await client.get("/v1/store/a/b")
        assert (answer.status_code, answer.content) == (200, b"\x00\xff")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert (await client.get("/v1/store")).json() == ["a/b"]
        assert (await client.get("/v1/store", params={"prefix": "b"})).json() == []
        answer = await client.delete("/v1/store/a/b")
        assert (answer.status_code, answer.content) == (204, b"")
        check_problem(await client.delete("/v1/store/a/b"), 404, "key-not-found")
        assert "'a/b'" in check_problem(await client.get("/v1/store/a/b"), 404, "key-not-found")

    async def test_a_body_is_bytes_whatever_it_is_called(self, client):
        await client.put("/v1/store/k", content=b"{", headers={"Content-Type": "application/json"})
        assert (await client.get("/v1/store/k")).content == b"{"

    async def test_the_endpoints_names_are_keys_too(self, client):
        for key in ("add", "wait"):
            assert (await client.put(f"/v1/store/{key}", content=b"v")).status_code == 204
            assert (await client.get(f"/v1/store/{key}")).content == b"v"

    @pytest.mark.parametrize("key", ["", "k" * 1025])
    async def test_what_is_no_key(self, client, key):
        check_problem(await client.put(f"/v1/store/{key}", content=b""), 422, "invalid-key")
        check_problem(await client.get(f"/v1/store/{key}"), 422, "invalid-key")
        check_problem(await client.delete(f"/v1/store/{key}"), 422, "invalid-key")
        check_problem(await client.post("/v1/store/add", json={"key": key}), 422, "invalid-key")
        check_problem(await client.post("/v1/store/wait", json={"keys": [key]}), 422, "invalid-key")


class TestAdd:
    async def test_add(self, client):
        assert (await client.post("/v1/store/add", json={"key": "n"})).json() == {"value": 1}
        assert (await client.post("/v1/store/add", json={"key": "n", "amount": 4})).json() == {"value": 5}
        assert (await client.get("/v1/store/n")).content == b"5"

    async def test_not_a_number(self, client):
        await client.put("/v1/store/n", content=b"many")
        assert "b'many'" in check_problem(await client.post("/v1/store/add", json={"key": "n"}), 409, "not-a-number")

    @pytest.mark.parametrize("amount", ["one", 1.5, None])
    async def test_amounts_that_are_none(self, client, amount):
        answer = await client.post("/v1/store/add", json={"key": "n", "amount": amount})
        assert check_problem(answer, 422, "invalid-request").startswith("body.amount: ")

    async def test_an_amount_without_end(self, client):
        headers = {"Content-Type": "application/json"}
        body = b'{"key": "n", "amount": %s}' % (b"9" * 1000)
        check_problem(await client.post("/v1/store/add", content=body, headers=headers), 409, "not-a-number")


class TestWaiting:
    async def test_wait(self, client, agent):
        waiting = asyncio.create_task(client.post("/v1/store/wait", json={"keys": ["a", "b"]}))
        await client.put("/v1/store/a", content=b"")
        await client.put("/v1/store/b", content=b"")
        assert (await waiting).json() == {"ok": True}
        assert agent.store.table._watches == {}

    async def test_get_waits(self, client):
        waiting = asyncio.create_task(client.get("/v1/store/k", params={"wait": 20}))
        await client.put("/v1/store/k", content=b"v")
        assert (await waiting).content == b"v"

    async def test_a_wait_that_ran_out_names_the_missing_keys(self, client):
        await client.put("/v1/store/b", content=b"")
        answer = await client.post("/v1/store/wait", json={"keys": ["a", "b", "c"], "timeout": 0.01})
        assert check_problem(answer, 408, "store-timeout").endswith("'a', 'c'")

    @pytest.mark.parametrize(
        ("asked", "given"),
        [("1e9", LONG_POLL_SECONDS), ("inf", LONG_POLL_SECONDS), ("3", 3.0), ("-1", 0.0), ("nan", 0.0)],
    )
    async def test_waits_are_cut_to_one_long_poll(self, client, agent, monkeypatch, asked, given):
        waits = []

        async def get(key, seconds):
            waits.append(seconds)
            return b""

        async def wait(keys, seconds):
            waits.append(seconds)

        monkeypatch.setattr(agent.store, "get", get)
        monkeypatch.setattr(agent.store, "wait", wait)
        await client.get("/v1/store/k", params={"wait": asked})
        await client.post("/v1/store/wait", json={"keys": ["k"], "timeout": asked})
        assert waits == [given, given]

    async def test_a_wait_that_is_no_number(self, client):
        answer = await client.get("/v1/store/k", params={"wait": "long"})
        assert check_problem(answer, 422, "invalid-request").startswith("query.wait: ")


class TestClientsThatGo:
    @pytest.fixture
    def url(self, agent) -> Iterator[str]:
        listener = bind("127.0.0.1", 0, what="test")
        address = url_of(listener)
        server = HttpThread(lambda: create_app(SimpleNamespace(store=agent.store)), listener, "test")
        server.start()
        yield address
        server.stop()

    @pytest.fixture
    def connect(self, url):
        target = urlsplit(url)
        return lambda: socket.create_connection((target.hostname, target.port), timeout=10.0)

    @pytest.mark.parametrize("asked", ["GET /v1/store/k?wait=20", "POST /v1/store/wait"])
    async def test_their_waits_end(self, agent, connect, asked, caplog):
        body = '{"keys": ["k"]}'
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        with connect() as connection:
            connection.sendall(f"{asked} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            await self.until(lambda: "k" in agent.store.table._watches)
        await self.until(lambda: agent.store.table._watches == {})
        self.check_nothing_failed(caplog)

    async def test_half_a_value_is_not_stored(self, agent, connect, caplog):
        with connect() as connection:
            connection.sendall(b"PUT /v1/store/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
        with connect() as connection:
            connection.sendall(b"GET /v1/store/k HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        self.check_nothing_failed(caplog)

    def check_nothing_failed(self, caplog) -> None:
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []

    async def until(self, condition) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                await asyncio.sleep(0.002)
