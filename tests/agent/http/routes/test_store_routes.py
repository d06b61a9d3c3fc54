"""The store over HTTP: bodies, statuses, and how long requests are held."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS

JSON = {"Content-Type": "application/json"}

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
        for key in ("add", "wait", "count", "queue_pop"):
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

    async def test_the_same_idempotency_key_does_not_add_twice(self, client):
        for _ in range(3):
            answer = await client.post("/v1/store/add", json={"key": "n"}, headers={"Idempotency-Key": "a"})
            assert answer.json() == {"value": 1}
        answer = await client.post("/v1/store/add", json={"key": "n"}, headers={"Idempotency-Key": "b"})
        assert answer.json() == {"value": 2}
        answer = await client.post("/v1/store/add", json={"key": "m"}, headers={"Idempotency-Key": "b"})
        check_problem(answer, 422, "idempotency-key-reused")
        answer = await client.post("/v1/store/add", json={"key": "m"}, headers={"Idempotency-Key": "x" * 256})
        assert check_problem(answer, 422, "invalid-request").startswith("header.Idempotency-Key: ")


class TestConditions:
    async def test_set_only_if_it_is_not_there(self, client):
        answer = await client.put("/v1/store/k", content=b"1", headers={"If-None-Match": "*"})
        assert answer.status_code == 204
        answer = await client.put("/v1/store/k", content=b"2", headers={"If-None-Match": "*"})
        check_problem(answer, 412, "precondition-failed")
        assert (await client.get("/v1/store/k")).content == b"1"
        tag = (await client.get("/v1/store/k")).headers["etag"]
        for same in (tag, f"W/{tag}", f'"x", {tag}'):
            answer = await client.put("/v1/store/k", content=b"2", headers={"If-None-Match": same})
            check_problem(answer, 412, "precondition-failed")
            answer = await client.delete("/v1/store/k", headers={"If-None-Match": same})
            check_problem(answer, 412, "precondition-failed")
        answer = await client.put("/v1/store/k", content=b"2", headers={"If-None-Match": '"x", W/"y"'})
        assert answer.status_code == 204
        assert (await client.get("/v1/store/k")).content == b"2"

    async def test_a_value_that_is_known_is_not_sent_again(self, client):
        tag = (await client.put("/v1/store/k", content=b"1")).headers["etag"]
        for known in (tag, f"W/{tag}", f'"x" ,\t{tag}', "*"):
            answer = await client.get("/v1/store/k", headers={"If-None-Match": known})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
            assert "content-type" not in answer.headers
        assert (await client.get("/v1/store/k", headers={"If-None-Match": '"x"'})).content == b"1"
        assert (await client.get("/v1/store/none", headers={"If-None-Match": "*"})).status_code == 404

    async def test_a_value_that_has_to_be_a_certain_one(self, client):
        tag = (await client.put("/v1/store/k", content=b"1")).headers["etag"]
        assert (await client.get("/v1/store/k", headers={"If-Match": tag})).content == b"1"
        answer = await client.get("/v1/store/k", headers={"If-Match": f"W/{tag}"})
        check_problem(answer, 412, "precondition-failed")
        answer = await client.get("/v1/store/k", headers={"If-Match": '"x"', "If-None-Match": tag})
        check_problem(answer, 412, "precondition-failed")

    async def test_a_condition_may_come_in_several_lines(self, client):
        tag = (await client.put("/v1/store/k", content=b"1")).headers["etag"]
        for lines, status in (((tag, '"x"'), 204), (('"x"', tag), 204), (('"x"', '"y"'), 412)):
            answer = await client.put("/v1/store/k", content=b"1", headers=[("If-Match", line) for line in lines])
            assert answer.status_code == status

    @pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
    async def test_what_is_no_list_of_tags(self, client, header):
        for nonsense in ("nonsense", '"open', "* , *", '"a" "b"'):
            answer = await client.put("/v1/store/k", content=b"1", headers={header: nonsense})
            check_problem(answer, 422, "invalid-request")

    async def test_head_tells_what_get_would(self, client):
        tag = (await client.put("/v1/store/k", content=b"four")).headers["etag"]
        answer = await client.head("/v1/store/k")
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (200, b"", tag)
        assert (answer.headers["content-length"], answer.headers["content-type"]) == ("4", "application/octet-stream")
        assert (await client.head("/v1/store/none")).status_code == 404
        answer = await client.head("/v1/store/add")
        assert answer.status_code in (404, 405)

    async def test_replace_only_what_was_read(self, client):
        put = await client.put("/v1/store/k", content=b"1")
        read = await client.get("/v1/store/k")
        assert put.headers["etag"] == read.headers["etag"]
        tag = read.headers["etag"]
        for headers in ({"If-Match": f'"x", {tag}'}, {"If-Match": "*"}):
            answer = await client.put("/v1/store/k", content=b"2", headers=headers)
            assert answer.status_code == 204
        for stale in (tag, f"W/{answer.headers['etag']}", 'W/"*", "x"', ""):
            answer = await client.put("/v1/store/k", content=b"3", headers={"If-Match": stale})
            check_problem(answer, 412, "precondition-failed")
            check_problem(await client.delete("/v1/store/k", headers={"If-Match": stale}), 412, "precondition-failed")
        assert (await client.get("/v1/store/k")).content == b"2"
        answer = await client.delete(
            "/v1/store/k", headers={"If-Match": (await client.get("/v1/store/k")).headers["etag"]}
        )
        assert answer.status_code == 204

    async def test_equal_values_have_equal_tags(self, client):
        tags = [(await client.put("/v1/store/k", content=value)).headers["etag"] for value in (b"1", b"2", b"1")]
        assert tags[0] == tags[2] != tags[1]


class TestMoreValues:
    async def test_append(self, client):
        for part in (b"\xff", b"", b"\x00"):
            answer = await client.post("/v1/store/append", params={"key": "a/b"}, content=part)
            assert (answer.status_code, answer.content) == (204, b"")
        assert (await client.get("/v1/store/a/b")).content == b"\xff\x00"

    async def test_compare_set(self, client):
        first = {"key": "k", "expected": "", "desired": "/w=="}
        answer = await client.post("/v1/store/compare_set", json=first)
        assert (answer.status_code, answer.content) == (200, b"\xff")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert (await client.post("/v1/store/compare_set", json=first | {"desired": "MQ=="})).content == b"\xff"
        assert (await client.post("/v1/store/compare_set", json=first | {"expected": "/w=="})).content == b"\xff"

    async def test_several_at_once(self, client):
        values = {"a": "/w==", "b": ""}
        answer = await client.post("/v1/store/multi_set", json={"values": values})
        assert (answer.status_code, answer.content) == (204, b"")
        answer = await client.post("/v1/store/multi_get", json={"keys": ["b", "a", "b"]})
        assert answer.json() == {"values": values}
        assert (await client.post("/v1/store/check", json={"keys": ["a", "b"]})).json() == {"found": True}
        assert (await client.post("/v1/store/check", json={"keys": ["a", "none"]})).json() == {"found": False}
        assert (await client.post("/v1/store/count")).json() == {"value": 2}

    async def test_all_or_none_are_set(self, client):
        values = {"good": "", "bad": "not base64"}
        answer = await client.post("/v1/store/multi_set", json={"values": values})
        assert "'not base64'" in check_problem(answer, 422, "invalid-value")
        assert (await client.get("/v1/store")).json() == []

    async def test_no_answer_is_larger_than_a_request(self, client):
        for key in "ab":
            await client.put(f"/v1/store/{key}", content=bytes(40 << 20))
        check_problem(await client.post("/v1/store/multi_get", json={"keys": ["a", "b"]}), 422, "invalid-value")


class TestQueues:
    async def test_a_life(self, client):
        for value in (b"1", b"\xff"):
            answer = await client.post("/v1/store/queue_push", params={"key": "q"}, content=value)
            assert (answer.status_code, answer.content) == (204, b"")
        assert (await client.post("/v1/store/queue_len", json={"key": "q"})).json() == {"value": 2}
        for value in (b"1", b"\xff"):
            answer = await client.post("/v1/store/queue_pop", json={"key": "q"})
            assert (answer.status_code, answer.content) == (200, value)
        answer = await client.post("/v1/store/queue_pop", json={"key": "q", "timeout": 0.01})
        assert "'q'" in check_problem(answer, 404, "queue-empty")

    async def test_who_lost_the_answer_gets_it_again(self, client):
        for value in (b"1", b"2"):
            await client.post("/v1/store/queue_push", params={"key": "q"}, content=value)
        name = {"Idempotency-Key": "mine"}
        for _ in range(2):
            assert (await client.post("/v1/store/queue_pop", json={"key": "q"}, headers=name)).content == b"1"
        assert (await client.post("/v1/store/queue_pop", json={"key": "q"})).content == b"2"

    async def test_pop_waits(self, client):
        waiting = asyncio.create_task(client.post("/v1/store/queue_pop", json={"key": "q", "timeout": 20}))
        await client.post("/v1/store/queue_push", params={"key": "q"}, content=b"v")
        assert (await waiting).content == b"v"


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

        async def execute(command):
            waits.append(command.seconds)
            return b""

        monkeypatch.setattr(agent.store, "execute", lambda command, idempotency_key="": execute(command))
        await client.get("/v1/store/k", params={"wait": asked})
        for path, said in (("wait", '"keys": ["k"]'), ("queue_pop", '"key": "k"')):
            written = {"inf": "Infinity", "nan": "NaN"}.get(asked, asked)
            await client.post(f"/v1/store/{path}", content=f'{{{said}, "timeout": {written}}}', headers=JSON)
        assert waits == [given, given, given]

    async def test_a_wait_that_is_no_number(self, client):
        answer = await client.get("/v1/store/k", params={"wait": "long"})
        assert check_problem(answer, 422, "invalid-request").startswith("query.wait: ")


class TestClientsThatGo:
    @pytest.fixture
    def url(self, agent) -> Iterator[str]:
        listener = bind("127.0.0.1", 0, purpose="test")
        address = url_of(listener)
        server = HttpServer(listener, "test")
        server.start(lambda: create_app(SimpleNamespace(store=agent.store)))
        yield address
        server.close()

    @pytest.fixture
    def connect(self, url):
        target = urlsplit(url)
        return lambda: socket.create_connection((target.hostname, target.port), timeout=60.0)

    @pytest.mark.parametrize("asked", ["GET /v1/store/k?wait=20", "POST /v1/store/wait"])
    async def test_their_waits_end(self, agent, connect, asked, caplog):
        body = '{"keys": ["k"]}'
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        with connect() as connection:
            connection.sendall(f"{asked} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            await self.until(lambda: "k" in agent.store.table._watches)
        await self.until(lambda: agent.store.table._watches == {})
        self.check_nothing_failed(caplog)

    async def test_what_they_would_have_taken_stays_in_the_queue(self, agent, connect, client):
        body = '{"key": "q", "timeout": 20}'
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        with connect() as connection:
            connection.sendall(f"POST /v1/store/queue_pop HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            await self.until(lambda: "q" in agent.store.table._pending_pops)
        await self.until(lambda: agent.store.table._pending_pops == {})
        await client.post("/v1/store/queue_push", params={"key": "q"}, content=b"v")
        assert (await client.post("/v1/store/queue_pop", json={"key": "q"})).content == b"v"

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
        async with asyncio.timeout(30.0):
            while not condition():
                await asyncio.sleep(0.002)
