"""Requests over HTTP with hostile bodies and headers are refused, on every route that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.hostile import allocations_within
from support.http_ranks import applications, clients
from support.served_store import ServedStore
from support.threads import world
from support.views import FakeAgent

from rankmesh._collectives.object_frames import Incoming, Outgoing
from rankmesh._collectives.serialize import Message
from rankmesh_agent.group.options import Options
from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.wire.errors import CollectiveMismatchError, ProtocolError
from rankmesh_agent.wire.object_records import MIN_TAG, OBJECTS, RECORD_TAG
from rankmesh_gateway.http.app import create_app as create_gateway

pytestmark = pytest.mark.anyio

SERVICES = {
    "agent": lambda: create_app(FakeAgent(), leases=FakeAgent()),
    "store": lambda: create_store_app(ServedStore()),
    "gateway": create_gateway,
}
JSON = "application/json"
HOSTILE = {
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "not UTF-8": b'{"job": "\xff"}',
    "NaN": b"NaN",
    "10**400": b"1" + b"0" * 400,
    "10**5000": b"1" + b"0" * 5000,
    "1e999": b"1e999",
}


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700")


@pytest.fixture(params=SERVICES)
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(SERVICES[request.param]()) as client:
        yield client


def fields(document: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """Return the names of the fields of an operation's JSON body."""
    schema = operation["requestBody"]["content"][JSON]["schema"]
    for each in schema.get("anyOf", [schema]):
        if "$ref" in each:
            schema = document["components"]["schemas"][each["$ref"].rpartition("/")[2]]
    return list(schema.get("properties", {}))


async def test_hostile_json_is_refused_on_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    asked = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if JSON not in operation.get("requestBody", {}).get("content", {}):
                continue
            url = path.replace("{group_id}", "world").replace("{group}", "world").replace("{key}", "key")
            names = fields(document, operation)
            for name, value in HOSTILE.items():
                whole = b"{" + b",".join(b'"%s":%s' % (field.encode(), value) for field in names) + b"}"
                for body in (value, whole):
                    answer = await client.request(method, url, content=body, headers={"Content-Type": JSON})
                    where = f"{method} {url}, {name}: {answer.status_code} {answer.text:.200}"
                    assert 400 <= answer.status_code < 500, where
                    assert answer.headers["content-type"] == "application/problem+json", where
                    asked += 1
    assert asked


@pytest.mark.parametrize(
    "host", ["[::1].evil.com", "[::1]evil.com:80", "[::1", "[localhost].evil.com", "localhost:80:evil.com", "[]", ""]
)
async def test_a_host_that_begins_like_an_address_is_refused(client: httpx.AsyncClient, host: str) -> None:
    answer = await client.get("/livez", headers={"Host": host})
    assert (answer.status_code, answer.json()["code"]) == (421, "unknown-host")


@pytest.mark.parametrize("call", ["send?dst=1", "recv?src=1"])
@pytest.mark.parametrize("tag", [RECORD_TAG, RECORD_TAG + 1, MIN_TAG - 1])
async def test_reserved_tags_are_refused(call: str, tag: int) -> None:
    with world(2, "tcp") as ranks:
        async with clients(applications(ranks)) as (client, _):
            url = f"/v1/groups/world/{call}&tag={tag}&dtype=uint8&shape=1024"
            answer = await client.post(url, content=bytes(1024))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")


async def test_encoded_objects_are_refused() -> None:
    record = Outgoing(Message(b"x", [], pickled=False)).record
    stack = np.stack([np.zeros_like(record), record])
    with world(2, "tcp") as ranks:
        async with clients(applications(ranks)) as (client, _):
            for call in ("all_gather", "gather?dst=1", "send?dst=1", "broadcast?src=0", "scatter?src=0", "all_to_all"):
                array = stack if call.startswith(("scatter", "all_to_all")) else record
                shape = ",".join(map(str, array.shape))
                url = f"/v1/groups/world/{call}{'&' if '?' in call else '?'}dtype=uint8&shape={shape}"
                answer = await client.post(url, content=array.tobytes())
                assert (answer.status_code, answer.json()["code"]) == (400, "invalid-tensor"), call


def test_rests_of_objects_match_no_call_of_a_client() -> None:
    def call(group: Any) -> str:
        arrays = [np.zeros(8, np.uint8) for _ in range(2)]
        with pytest.raises(CollectiveMismatchError) as caught:
            group.all_gather(arrays, arrays[0], Options(10.0), OBJECTS if group.rank else "")
        return caught.value.message

    with world(2, "tcp") as ranks:
        assert all("all_gather(uint8[8], objects)" in text for text in ranks.run(call))


def test_a_rest_with_the_tag_of_a_users_message_is_refused() -> None:
    record = Outgoing(Message(bytes(2000), [], pickled=False)).record.copy()
    record[16:24] = np.frombuffer((5).to_bytes(8, "big"), np.uint8)
    with pytest.raises(ProtocolError, match="tag 5"):
        Incoming(record)


def test_nothing_is_allocated_for_a_body_that_has_not_come() -> None:
    async def ask() -> None:
        sent = [{"type": "http.request", "body": b"12345678", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return sent.pop(0)

        async def send(_: Any) -> None:
            return

        headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % (1 << 29))]
        path, query = "/v1/groups/world/all_reduce", b"dtype=uint8&shape=%d" % (1 << 29)
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": query}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}
        await apps[0](scope, receive, send)

    with world(1, "tcp") as ranks:
        apps = applications(ranks)
        asyncio.run(ask())
        with allocations_within(16 << 20):
            asyncio.run(ask())
