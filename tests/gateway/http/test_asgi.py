"""The requests that are answered without the web framework: the same answers as with it, and when it is loaded."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from rankmesh_agent.wire.schemas import GroupInfo
from rankmesh_gateway.http.app import create_services
from rankmesh_gateway.http.asgi import GatewayApplication
from rankmesh_gateway.state.registry import Registry

pytestmark = pytest.mark.anyio

GROUP = GroupInfo("0" * 16, "world", [0, 1], 7, "shm", "barrier #7", "")


def front_of(registry: Registry, make: Callable[[], Any]) -> GatewayApplication:
    return GatewayApplication(create_services(registry), make)


class Pair:
    """Two gateways with a registry each: one with the front, and one with the web application alone, as an oracle."""

    def __init__(self, clock: Callable[[], float], make_framework_app: Callable[..., Any]) -> None:
        self.registries = [Registry(clock), Registry(clock)]
        for registry in self.registries:
            registry.id = "the same"
        self.loaded = 0
        self.clients: list[httpx.AsyncClient] = []
        self._make_framework_app = make_framework_app
        for app in (
            front_of(self.registries[0], self.make),
            make_framework_app(create_services(self.registries[1]), number=1),
        ):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            self.clients.append(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1"))

    def make(self) -> Any:
        self.loaded += 1
        return self._make_framework_app(create_services(self.registries[0]))

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Ask both the same, and return the answer."""
        answers = [await client.request(method, path, **options) for client in self.clients]
        ours, theirs = ((a.status_code, a.headers["content-type"], a.headers.get("connection")) for a in answers)
        assert ours == theirs
        assert answers[0].json() == answers[1].json()
        return answers[0]


@pytest.fixture
async def pair(clock, make_framework_app, monkeypatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)  # ids of stores
    made = Pair(clock, make_framework_app)
    yield made
    for client in made.clients:
        await client.aclose()


async def test_the_life_of_a_rank(pair, ask):
    assert (await pair.ask("GET", "/health")).json()["ranks"] == 0
    first = await pair.ask("POST", "/v1/join", json=asdict(ask.join(0, wait=0.0)))
    assert first.json()["missing"] == [1]
    assert (await pair.ask("POST", "/v1/join", json=asdict(ask.join(1)))).json()["complete"]
    assert (await pair.ask("POST", "/v1/heartbeat", json=asdict(ask.heartbeat(0, 2, GROUP)))).json() == {"failed": []}
    found = (await pair.ask("GET", "/v1/snapshot")).json()
    assert [each["member"]["rank"] for each in found["ranks"]] == [0, 1]
    assert [(each["name"], each["seqs"]) for each in found["groups"]] == [("world", {"0": 7})]
    assert (await pair.ask("POST", "/v1/leave", json=asdict(ask.leave_unassigned(0)))).json() == {"ok": True}
    assert (await pair.ask("GET", "/health")).json()["ranks"] == 1
    assert pair.loaded == 0


async def test_the_life_of_an_agent(pair, ask):
    none = await pair.ask("POST", "/v1/leases", json=asdict(ask.lease(0)))
    assert (none.status_code, none.json()["code"]) == (404, "no-agents")
    assert (await pair.ask("POST", "/v1/agents", json=asdict(ask.agent(0)))).json() == {"ok": True}
    offer = (await pair.ask("POST", "/v1/leases", json=asdict(ask.lease(0)))).json()
    assert offer == {"agent": asdict(ask.agent(0))}
    assert (await pair.ask("POST", "/v1/agents", json=asdict(ask.agent(0, leased_to="pid 7")))).status_code == 200
    taken = await pair.ask("POST", "/v1/leases", json=asdict(ask.lease(0)))
    assert (taken.status_code, taken.json()["code"], taken.headers["retry-after"]) == (503, "no-free-agent", "1")
    assert (await pair.ask("POST", "/v1/agents/leave", json={"id": ask.agent(0).id})).json() == {"ok": True}
    assert pair.loaded == 0


async def test_refusals(pair, ask):
    await pair.ask("POST", "/v1/join", json=asdict(ask.join(0, wait=0.0)))
    taken = await pair.ask("POST", "/v1/join", json=asdict(ask.join(0, life=2)))
    assert (taken.status_code, taken.headers["content-type"]) == (409, "application/problem+json")
    problem = taken.json()
    assert (problem["code"], problem["ranks"], problem["address"]) == ("rank-taken", [0], "http://10.0.0.1:9000")
    assert "rank 0 (host0, pid 100)" in problem["detail"]
    nonsense = await pair.ask("POST", "/v1/join", json=asdict(ask.join(5, 2)))
    assert (nonsense.status_code, nonsense.json()["code"]) == (422, "invalid-request")
    for registry in pair.registries:
        registry.close()
    closing = await pair.ask("POST", "/v1/join", json=asdict(ask.join(1)))
    assert (closing.status_code, closing.headers["connection"]) == (503, "close")
    assert pair.loaded == 0


async def test_a_bug(pair, ask, monkeypatch):
    for registry in pair.registries:
        monkeypatch.setattr(registry, "leave", lambda body: 1 / 0)
    answer = await pair.ask("POST", "/v1/leave", json=asdict(ask.leave_unassigned(0)))
    assert (answer.status_code, answer.json()["code"]) == (500, "internal-error")


JSON = {"content-type": "application/json"}
PASSED_ON: dict[str, dict[str, Any]] = {
    "no json": {"method": "POST", "path": "/v1/leave", "content": b"{", "headers": JSON},
    "another media type": {"method": "POST", "path": "/v1/leave", "content": b"{}"},
    "no body": {"method": "POST", "path": "/v1/heartbeat"},
    "another method": {"method": "GET", "path": "/v1/join"},
    "an invalid query": {"method": "GET", "path": "/v1/diagnosis?patience=soon"},
    "nowhere": {"method": "POST", "path": "/v1/joins"},
}


@pytest.mark.parametrize("request_", PASSED_ON.values(), ids=PASSED_ON)
async def test_what_is_passed_on_loads_the_web_application_once(pair, ask, request_):
    await pair.ask(**request_)
    body = json.dumps(asdict(ask.join(0, 1)))  # it is passed on with its body
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await pair.ask("POST", "/v1/join", content=body, headers=headers)).json()["complete"]
    assert pair.loaded == 1


async def test_others_are_answered_while_it_is_made(registry, make_framework_app):
    making, done = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def make() -> Any:
        loop.call_soon_threadsafe(making.set)
        asyncio.run_coroutine_threadsafe(done.wait(), loop).result(20)
        return make_framework_app(create_services(registry))

    front = front_of(registry, make)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://127.0.0.1") as client:
        waiting = [asyncio.ensure_future(client.get("/v1/none")) for _ in range(2)]
        await making.wait()
        assert (await client.get("/health")).status_code == 200
        assert not any(each.done() for each in waiting)
        done.set()
        assert [(await each).json()["code"] for each in waiting] == ["not-found"] * 2


async def test_a_gateway_that_ends_while_it_is_made_says_so(registry, make_framework_app):
    made = threading.Event()

    def make() -> Any:
        made.wait(20)
        return make_framework_app(create_services(registry))

    front = front_of(registry, make)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://127.0.0.1") as client:
        waiting = [asyncio.ensure_future(client.request(method, "/v1/none")) for method in ("GET", "POST")]
        while front._framework_app is None:
            await asyncio.sleep(0.001)
        registry.close()
        for each in waiting:
            answer = await each
            assert (answer.status_code, answer.json()["code"]) == (503, "gateway-closing")
        made.set()
        await front._framework_app
        assert (await client.get("/v1/groups/none")).json()["code"] == "group-not-found", "reading goes on to work"


async def test_a_body_that_comes_in_pieces_and_one_that_does_not_come(registry, ask):
    front = front_of(registry, lambda: pytest.fail("nobody needs it"))
    scope = {"type": "http", "method": "POST", "path": "/v1/leave", "headers": [(b"content-type", b"application/json")]}
    pieces = [
        {"type": "http.request", "body": b'{"job": "a", "epoch": 1, ', "more_body": True},
        {"type": "http.request", "body": b'"rank": 0, "instance": "b"}'},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await front(scope, receive, send)
    assert [sent[0]["status"], sent[1]["body"]] == [200, b'{"ok":true}']
    sent.clear()
    await front(scope, receive, send)
    assert not sent


def test_a_gateway_is_made_without_the_framework():
    code = "import sys, rankmesh_gateway.http.app as app; app.create_app(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"fastapi", "pydantic", "starlette"} & set(loaded.split())


async def test_the_registry_is_scanned_while_the_server_runs(registry, monkeypatch):
    monkeypatch.setattr("rankmesh_gateway.http.asgi.SCAN_SECONDS", 0.001)
    scanned, ending, sent = asyncio.Event(), asyncio.Event(), []
    monkeypatch.setattr(registry, "poll_timeouts", scanned.set)
    steps = iter([asyncio.sleep(0), ending.wait()])

    async def receive() -> dict[str, Any]:
        await next(steps)
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    serving = asyncio.create_task(front_of(registry, dict)({"type": "lifespan"}, receive, send))
    await asyncio.wait_for(scanned.wait(), 30)
    assert sent == ["lifespan.startup.complete"]
    assert registry._scans_expected
    ending.set()
    await serving
    assert sent[1:] == ["lifespan.shutdown.complete"]
    assert not registry._scans_expected
