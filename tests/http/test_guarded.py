"""Every endpoint of every service, as its OpenAPI document lists them: who may ask, and how refusals look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from support.served_store import ServedStore
from support.views import FakeAgent

from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.http.middleware import OPEN_PATHS
from rankmesh_gateway.http.app import create_app as create_gateway

pytestmark = pytest.mark.anyio

TOKEN = {"Authorization": "Bearer secret"}
WITHOUT_A_TOKEN = {"/health", "/livez", "/readyz", "/", "/dashboard/{name}"}
"""Health, and the dashboard's page, which has no data in it."""
PART = "icon.svg"
"""A part of the dashboard."""
ENDLESS = {"/v1/events"}
VERBS = ("GET", "POST", "PUT", "PATCH", "DELETE")


SERVICES = {
    "agent": lambda: create_app(FakeAgent(), token="secret", leases=FakeAgent()),
    "store": lambda: create_store_app(ServedStore(), token="secret"),
    "gateway": lambda: create_gateway(token="secret"),
}


class Client(httpx.AsyncClient):
    """A client of a service, with the service's OpenAPI document."""

    def __init__(self, app: Any, **options: Any) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://127.0.0.1:8700", **options)
        self.document: dict[str, Any] = {}


async def fetch_document(app: Any) -> dict[str, Any]:
    async with Client(app, headers=TOKEN) as client:
        answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module", params=SERVICES)
def service(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    app = SERVICES[request.param]()
    return app, asyncio.run(fetch_document(app))


@pytest.fixture
async def client(service: tuple[Any, dict[str, Any]]) -> AsyncIterator[Client]:
    async with Client(service[0]) as client:
        client.document = service[1]
        yield client


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Return the verb, path as it is written, and a path to ask."""
    for path, methods in found["paths"].items():
        for method in methods:
            yield (
                method.upper(),
                path,
                path.replace("{key}", "key").replace("{group_id}", "world").replace("{name}", PART),
            )


def check(answer: httpx.Response, status: int, code: str) -> None:
    where = f"{answer.request.method} {answer.request.url}"
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), where
    body = answer.json()
    assert (body["status"], body["code"]) == (status, code), where
    assert body["title"], where
    assert body["detail"], where


def test_what_is_open_everywhere_is_health() -> None:
    assert WITHOUT_A_TOKEN - {"/", "/dashboard/{name}"} == OPEN_PATHS


async def test_other_hosts_other_sites_and_large_bodies_are_refused_everywhere(client: Client) -> None:
    origins, lengths = ("http://evil.example", "http://127.0.0.1:1", "null"), (str(1 << 40), "9" * 30, "-1", "many")
    refusals = [
        ({"Host": "evil.example"}, 421, "unknown-host"),
        *(({"Origin": origin}, 403, "foreign-origin") for origin in origins),
        *(({"Content-Length": length}, 413, "body-too-large") for length in lengths),
    ]
    for method, _, asked in operations(client.document):
        for headers, status, code in refusals:
            check(await client.request(method, asked, headers=TOKEN | headers), status, code)


async def test_other_methods_are_refused_with_those_there_are(client: Client) -> None:
    for path, methods in client.document["paths"].items():
        if path.startswith("/v1/store/"):
            continue  # what is no endpoint there is a key
        there = {method.upper() for method in methods}
        asked = path.replace("{group_id}", "world").replace("{group}", "world").replace("{name}", PART)
        for method in set(VERBS) - there:
            answer = await client.request(method, asked, headers=TOKEN)
            check(answer, 405, "method-not-allowed")
            told = set(answer.headers["allow"].split(", "))
            assert there <= told, path
            assert not (told - there - {"HEAD"}) or "{" in path or path == "/v1/groups", path


async def test_head_is_answered_where_get_is(client: Client) -> None:
    for method, path, asked in operations(client.document):
        if method != "GET" or "{" in path or path in ENDLESS:
            continue
        got = await client.get(asked, headers=TOKEN)
        answer = await client.head(asked, headers=TOKEN)
        assert (answer.status_code, answer.content) == (got.status_code, b""), path
        assert answer.headers["content-type"] == got.headers["content-type"], path


async def test_head_of_a_stream_ends() -> None:
    async with Client(SERVICES["gateway"](), timeout=60) as client:
        answer = await client.head("/v1/events", headers=TOKEN)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_what_is_not_there_is_a_problem_too(client: Client) -> None:
    for path in ("/v1/nothing", "/nothing", "/docs", "/redoc"):
        check(await client.get(path, headers=TOKEN), 404, "not-found")
