"""The store over HTTP: bodies, statuses, and how long requests are held."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net import pool
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.store import client as store_client
from rankmesh_agent.store import store as store_base
from rankmesh_agent.store.keys import etag
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS

JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.anyio


class Step(NamedTuple):
    """A request, and its answer.

    Attributes:
        request: the method and the path below ``/v1/store``.
        status: of the answer.
        shown: bytes or JSON of the answer; of a problem, its code and, after a colon, a part of its detail.
        options: body, headers and query of the request.
    """

    request: str
    status: int
    shown: Any
    options: dict[str, Any]


def step(request: str, status: int, shown: Any = b"", **options: Any) -> Step:
    return Step(request, status, shown, options)


def put(value: bytes, status: int = 204, shown: Any = b"", *, key: str = "k", **headers: str) -> Step:
    return step(f"PUT /{key}", status, shown, content=value, headers=fields(headers))


def get(value: Any, status: int = 200, *, key: str = "k", **headers: str) -> Step:
    return step(f"GET /{key}", status, value, headers=fields(headers))


def delete(status: int, shown: Any = b"", *, key: str = "k", **headers: str) -> Step:
    return step(f"DELETE /{key}", status, shown, headers=fields(headers))


def post(path: str, shown: Any, body: dict[str, Any] | None = None, *, status: int = 200, name: str = "") -> Step:
    options = {"headers": {"Idempotency-Key": name}} if name else {}
    return step(f"POST /{path}", status, shown, **options, **({} if body is None else {"json": body}))


def fields(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


ONE, TWO = etag(b"1"), etag(b"2")
FAILED, INVALID = "precondition-failed", "invalid-request"
SAME = f"{FAILED}:key 'k' has that very value, with ETag {ONE}"
OTHER = f"{FAILED}:key 'k' has another value, with ETag {TWO}"
SWAP = {"key": "k", "expected": "", "desired": "/w=="}
SESSIONS: dict[str, list[Step]] = {
    "a value": [
        put(b"\x00\xff", key="a/b"),
        get(b"\x00\xff", key="a/b"),
        step("GET ", 200, ["a/b"]),
        step("GET ", 200, [], params={"prefix": "b"}),
        delete(204, key="a/b"),
        delete(404, "key-not-found", key="a/b"),
        get("key-not-found:'a/b'", 404, key="a/b"),
    ],
    "any text is a key": [
        each
        for key in ("/a", "a//b/", ".", "..", "../up", "add", "a?b#c", "100%", "%2F", "a b+c", "世界", "\x00\n", "a\nb")
        for name in [quote(key, safe="").replace(".", "%2E")]
        for each in (
            put(b"v", key=name),
            get(b"v", key=name),
            step("GET ", 200, [key], params={"prefix": key}),
            delete(204, key=name),
            step("POST /append", 204, params={"key": key}, content=b"0"),
            step("POST /queue_push", 204, params={"key": key}, content=b"q"),
            post("queue_len", {"value": 1}, {"key": key}),
            get(b"0", key=name),
            delete(204, key=name),
        )
    ],
    "a body is bytes, whatever its type": [put(b"{", Content_Type="application/json"), get(b"{")],
    "invalid keys": [
        each
        for key in ("", "k" * 8193)
        for each in (
            put(b"", 422, "invalid-key", key=key),
            get("invalid-key", 422, key=key),
            delete(422, "invalid-key", key=key),
            post("add", "invalid-key", {"key": key}, status=422),
            post("wait", "invalid-key", {"keys": [key]}, status=422),
        )
    ],
    "add": [
        post("add", {"value": 1}, {"key": "k"}),
        post("add", {"value": 5}, {"key": "k", "amount": 4}),
        get(b"5"),
        put(b"many"),
        post("add", "not-a-number:b'many'", {"key": "k"}, status=409),
        *(
            post("add", f"{INVALID}:body.amount: ", {"key": "k", "amount": amount}, status=422)
            for amount in ("one", 1.5, None)
        ),
        step("POST /add", 409, "not-a-number", content=b'{"key": "n", "amount": %s}' % (b"9" * 1000), headers=JSON),
    ],
    "idempotency keys": [
        *[post("add", {"value": 1}, {"key": "n"}, name="a")] * 2,
        post("add", "idempotency-key-reused", {"key": "m"}, status=422, name="a"),
        post("add", f"{INVALID}:header.Idempotency-Key: ", {"key": "m"}, status=422, name="x" * 256),
    ],
    "If-None-Match of a change": [
        put(b"1", If_None_Match="*"),
        put(b"2", 412, f"{FAILED}:key 'k' has a value already", If_None_Match="*"),
        *(
            each
            for same in (ONE, f"W/{ONE}", f'"x", {ONE}')
            for each in (put(b"2", 412, SAME, If_None_Match=same), delete(412, SAME, If_None_Match=same))
        ),
        put(b"2", If_None_Match='"x", W/"y"'),
        get(b"2"),
    ],
    "If-None-Match of a read": [
        put(b"1"),
        *(get(b"", 304, If_None_Match=known) for known in (ONE, f"W/{ONE}", f'"x" ,\t{ONE}', "*")),
        get(b"1", If_None_Match='"x"'),
        get("key-not-found", 404, key="none", If_None_Match="*"),
    ],
    "If-Match of a read": [
        put(b"1"),
        get(b"1", If_Match=ONE),
        get(FAILED, 412, If_Match=f"W/{ONE}"),
        get(FAILED, 412, If_Match='"x"', If_None_Match=ONE),
    ],
    "If-Match of a change": [
        put(b"1", 412, f"{FAILED}:key 'k' has no value", If_Match="*"),
        delete(412, f"{FAILED}:key 'k' has no value", If_Match=ONE),
        put(b"1", If_None_Match=ONE),
        put(b"2", If_Match=f'"x", {ONE}'),
        put(b"2", If_Match="*"),
        *(
            each
            for stale in (ONE, f"W/{TWO}", 'W/"*", "x"', "")
            for each in (put(b"3", 412, OTHER, If_Match=stale), delete(412, OTHER, If_Match=stale))
        ),
        get(b"2"),
        delete(204, If_Match=TWO),
    ],
    "a condition in several lines": [
        put(b"1"),
        *(
            step("PUT /k", status, shown, content=b"1", headers=[("If-Match", line) for line in lines])
            for lines, status, shown in (
                ((ONE, '"x"'), 204, b""),
                (('"x"', ONE), 204, b""),
                (('"x"', '"y"'), 412, FAILED),
            )
        ),
    ],
    "no list of tags": [
        put(b"1", 422, INVALID, **{header: nonsense})
        for header in ("If_Match", "If_None_Match")
        for nonsense in ("nonsense", '"open', "* , *", '"a" "b"')
    ],
    "append": [
        *(step("POST /append", 204, params={"key": "k"}, content=part) for part in (b"\xff", b"", b"\x00")),
        get(b"\xff\x00"),
    ],
    "compare_set": [
        post("compare_set", b"\xff", SWAP),
        post("compare_set", b"\xff", SWAP | {"desired": "MQ=="}),
        post("compare_set", b"\xff", SWAP | {"expected": "/w=="}),
    ],
    "several keys": [
        step("POST /multi_set", 204, json={"values": {"a": "/w==", "b": ""}}),
        post("multi_get", {"values": {"a": "/w==", "b": ""}}, {"keys": ["b", "a", "b"]}),
        post("check", {"found": True}, {"keys": ["a", "b"]}),
        post("check", {"found": False}, {"keys": ["a", "none"]}),
        post("count", {"value": 2}),
        post("wait", {"ok": True}, {"keys": ["a"]}),
        post("wait", "store-timeout:'c', 'd'", {"keys": ["c", "a", "d"], "timeout": 0.01}, status=408),
    ],
    "all keys or none are set": [
        post("multi_set", "invalid-value:'not base64'", {"values": {"good": "", "bad": "not base64"}}, status=422),
        step("GET ", 200, []),
    ],
    "an answer over the limit of requests": [
        *(put(bytes(40 << 20), key=key) for key in "ab"),
        post("multi_get", "invalid-value", {"keys": ["a", "b"]}, status=422),
    ],
    "a queue": [
        *(step("POST /queue_push", 204, params={"key": "q"}, content=value) for value in (b"1", b"\xff")),
        post("queue_len", {"value": 2}, {"key": "q"}),
        *(post("queue_pop", value, {"key": "q"}) for value in (b"1", b"\xff")),
        post("queue_pop", "queue-empty:'q'", {"key": "q", "timeout": 0.01}, status=404),
    ],
    "a wait that is no number": [step("GET /k", 422, f"{INVALID}:query.wait: ", params={"wait": "long"})],
}


@pytest.mark.parametrize("steps", SESSIONS.values(), ids=SESSIONS)
async def test_sessions(client, steps):
    for request, status, shown, options in steps:
        method, _, path = request.partition(" ")
        answer = await client.request(method, f"/v1/store{path}", **options)
        headers = answer.headers
        assert answer.status_code == status, (request, answer.text)
        if isinstance(shown, str):
            code, _, detail = shown.partition(":")
            assert headers["content-type"] == "application/problem+json"
            assert (answer.json()["status"], answer.json()["code"]) == (status, code)
            assert detail in answer.json()["detail"]
        elif isinstance(shown, bytes):
            assert answer.content == shown, request
            assert headers.get("content-type") == ("application/octet-stream" if status == 200 else None)
            if method == "PUT" or (method == "GET" and status == 200):
                assert headers["etag"] == etag(options.get("content", shown))
        else:
            assert answer.json() == shown, request


async def test_head_is_get_without_its_body(client):
    await client.put("/v1/store/k", content=b"four")
    answer = await client.head("/v1/store/k")
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (200, b"", etag(b"four"))
    assert (answer.headers["content-length"], answer.headers["content-type"]) == ("4", "application/octet-stream")
    assert (await client.head("/v1/store/none")).status_code == 404
    assert (await client.head("/v1/store/add")).status_code in (404, 405)


class TestWaiting:
    @pytest.mark.parametrize(
        ("request_", "found"),
        [
            (("GET", "k?wait=20"), b"v"),
            (("POST", "queue_pop", {"key": "k", "timeout": 20}), b"v"),
            (("POST", "wait", {"keys": ["k", "k2"]}), b'{"ok":true}'),
        ],
        ids=["get", "queue_pop", "wait"],
    )
    async def test_it_ends_with_the_change(self, client, agent, request_, found):
        method, path, *body = request_
        asked = client.request(method, f"/v1/store/{path}", json=body[0] if body else None)
        waiting = asyncio.create_task(asked)
        for key in ("k", "k2"):
            await client.put(f"/v1/store/{key}", content=b"v")
        await client.post("/v1/store/queue_push", params={"key": "k"}, content=b"v")
        assert (await waiting).content == found
        assert agent.store.table._watches == {}

    @pytest.mark.parametrize(
        ("asked", "given"),
        [("1e9", LONG_POLL_SECONDS), ("inf", LONG_POLL_SECONDS), ("3", 3.0), ("-1", 0.0), ("nan", 0.0)],
    )
    async def test_waits_are_cut_to_one_long_poll(self, client, agent, monkeypatch, asked, given):
        waits = []

        def execute(command, *_):
            waits.append(command.seconds)
            return b""

        monkeypatch.setattr(agent.store, "execute", execute)
        await client.get("/v1/store/k", params={"wait": asked})
        for path, reported in (("wait", '"keys": ["k"]'), ("queue_pop", '"key": "k"')):
            written = {"inf": "Infinity", "nan": "NaN"}.get(asked, asked)
            await client.post(f"/v1/store/{path}", content=f'{{{reported}, "timeout": {written}}}', headers=JSON)
        assert waits == [given, given, given]


class TestAServerThatIsGone:
    """The agent's other endpoints answer as before."""

    @pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it is stopped"])
    @pytest.mark.parametrize("waits", [True, False], ids=["a wait", "a change"])
    async def test_it_is_named(self, client, agent, monkeypatch, ends, waits):
        """Within the time limit of a response, 20 s."""
        assert store_client.SUBMIT_SECONDS == 20
        if ends:
            monkeypatch.setattr(pool, "_ACCEPT_SECONDS", 0.2)
        else:
            monkeypatch.setattr(store_client, "SUBMIT_SECONDS", 0.3)
            monkeypatch.setattr(store_base, "MARGIN_SECONDS", 0.3)
        await client.put("/v1/store/n", content=b"1")
        with contextlib.nullcontext() if ends else agent.store.table._lock:
            if ends:
                agent.store._server.close()
            asked = client.get("/v1/store/k?wait=0.1") if waits else client.post("/v1/store/add", json={"key": "n"})
            asking = asyncio.create_task(asked)
            assert (await client.get("/livez")).status_code == 200
            answer = await asking
        assert (answer.status_code, answer.json()["code"]) == (502, "network-error" if ends else "store-unresponsive")
        assert answer.json()["address"] in answer.json()["detail"]

    async def test_a_wait_ends_with_it(self, client, agent, monkeypatch):
        monkeypatch.setattr(pool, "_ACCEPT_SECONDS", 0.2)
        waiting = asyncio.create_task(client.get("/v1/store/k?wait=20"))
        async with asyncio.timeout(15.0):
            while not agent.store.table._watches:
                await asyncio.sleep(0.005)
            agent.store._server.close()
            assert (await waiting).status_code == 502
        assert agent.store.table._watches == {}

    async def test_many_waits_do_not_keep_out_who_sets(self, client, agent):
        async with asyncio.timeout(30.0):
            gets = [asyncio.create_task(client.get("/v1/store/k?wait=20")) for _ in range(48)]
            while len(agent.store.table._watches.get("k", ())) < 48:
                await asyncio.sleep(0.005)
            assert (await client.put("/v1/store/k", content=b"v")).status_code == 204
            assert [answer.content for answer in await asyncio.gather(*gets)] == [b"v"] * 48


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
