"""Events and the overview over HTTP, through a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rankmesh_agent.wire.schemas import GroupInfo, InFlight
from rankmesh_gateway.http.routes import events as route_module
from rankmesh_gateway.state import event_log as events_module

pytestmark = pytest.mark.anyio


class Listener:
    """An EventSource, as the standard describes it, over one connection."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        self.last_id = ""
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        """The next event: its kind and data."""
        kind, data = "", []
        async for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "id":
                self.last_id = value
            elif field == "event":
                kind = value
            elif field == "data":
                data.append(value)
            elif not line:
                if data:
                    return kind, json.loads("\n".join(data))
                kind = ""
        raise EOFError


@contextlib.asynccontextmanager
async def listen(client: httpx.AsyncClient, query: str = "", **headers: str) -> AsyncIterator[Listener]:
    async with client.stream("GET", f"/v1/events{query}", headers=headers) as answer:
        yield Listener(answer)


async def test_what_happens_comes_as_it_happens(client, registry, ask):
    registry.join(ask.join(0))
    async with listen(client) as listener:
        waiting = asyncio.ensure_future(listener.next())
        while not listener.last_id:
            await asyncio.sleep(0.01)
        registry.join(ask.join(1))
        kind, data = await waiting
        assert (kind, data["ranks"], data["job"]) == ("rank-joining", [1], "job")
        assert (await listener.next())[0] == "world-complete"


async def test_one_that_comes_back_misses_nothing_and_gets_nothing_twice(client, registry, ask):
    seen = []
    last: dict[str, str] = {}
    for rank in range(5):
        async with listen(client, **last) as listener:
            if rank == 0:
                registry.join(ask.join(rank, 6))
            kind, data = await listener.next()
            seen.append((kind, data["ranks"]))
            last = {"Last-Event-ID": listener.last_id}
        registry.join(ask.join(rank + 1, 6))
    async with listen(client, **last) as listener:
        for _ in range(2):
            kind, data = await listener.next()
            seen.append((kind, data["ranks"]))
    assert seen == [*(("rank-joining", [rank]) for rank in range(6)), ("world-complete", list(range(6)))]


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("?after=0", {}),
        ("", {"Last-Event-ID": "12"}),
        ("", {"Last-Event-ID": "not an id"}),
        ("?after=9223372036854775807", {}),
        ("?after=9223372036854775807", {"Last-Event-ID": "0"}),
    ],
)
async def test_an_id_of_an_earlier_gateway_stands_for_all_that_is_kept(client, registry, ask, query, headers):
    registry.join(ask.join(0))
    async with listen(client, query, **headers) as listener:
        assert (await listener.next())[0] == "rank-joining"


@pytest.mark.parametrize("query", ["?after=-1", "?after=x", "?overview=perhaps", "?after=9223372036854775808"])
async def test_nonsense(client, query):
    answer = await client.get(f"/v1/events{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")


async def test_of_listeners_that_come_at_once_those_beyond_the_limit_are_refused(client, monkeypatch):
    monkeypatch.setattr(events_module, "MAX_LISTENERS", 10)
    request = client.build_request("GET", "/v1/events?after=0")
    answers = await asyncio.gather(*(client.send(request, stream=True) for _ in range(40)))
    assert sorted(each.status_code for each in answers) == [200] * 10 + [503] * 30
    for each in answers:
        if each.status_code == 503:
            assert each.headers["content-type"] == "application/problem+json"
            assert json.loads(await each.aread())["code"] == "too-many-listeners"
        await each.aclose()


async def test_listeners_come_and_go(client, registry, eventually, monkeypatch):
    monkeypatch.setattr(events_module, "MAX_LISTENERS", 1)
    async with listen(client):
        await asyncio.to_thread(eventually, lambda: registry.events.listeners == 1)
        answer = await client.get("/v1/events")
        assert (answer.status_code, answer.json()["code"]) == (503, "too-many-listeners")
    await asyncio.to_thread(eventually, lambda: registry.events.listeners == 0)
    async with listen(client) as listener:
        waiting = asyncio.ensure_future(listener.next())
        await asyncio.to_thread(eventually, lambda: registry.events.listeners == 1)
        registry.close()
        assert await asyncio.wait_for(waiting, 20) == ("gateway-ended", {})
        with pytest.raises(EOFError):
            await asyncio.wait_for(listener.next(), 20)
    assert registry.events.listeners == 0


def test_one_that_takes_nothing_is_sent_away(url, registry, ask, eventually, monkeypatch):
    monkeypatch.setattr(route_module, "SLOW_SECONDS", 0.2)
    target = urlsplit(url)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((target.hostname, target.port))
        slow.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: registry.events.listeners == 1)
        flooding = threading.Event()

        def flood() -> None:
            until = time.monotonic() + 30
            while not flooding.is_set() and time.monotonic() < until:
                for _ in range(20):
                    registry.events.append("rank-left", "x" * 10_000)
                time.sleep(0.01)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            eventually(lambda: registry.events.listeners == 0)
        finally:
            flooding.set()
            thread.join()


async def test_an_overview(client, registry, ask, clock):
    call = InFlight("all_reduce(sum, float32 x 4)", 3, 0.5, 16)
    for second in range(2):
        for rank in range(2):
            group = GroupInfo("00000000000000aa", "world", [0, 1], 3 * second, "shm", "", "", 48 * second)
            if rank and second:
                group.inflight = [call]
            registry.heartbeat(ask.heartbeat(rank, 2, group))
        clock.advance(1)
    registry.agents.heartbeat(ask.agent(0))
    shown = (await client.get("/v1/overview")).json()
    assert shown["time"] == pytest.approx(time.time(), abs=30)
    assert shown["gateway"]["id"] == registry.id
    assert [rank["state"] for rank in shown["ranks"]] == ["alive", "alive"]
    assert [entry["agent"]["name"] for entry in shown["agents"]] == ["agent-0"]
    assert (shown["groups"][0]["operations_rate"], shown["groups"][0]["bytes_rate"]) == (3.0, 96.0)
    assert shown["rates"] == {"operations": 3.0, "bytes": 96.0}
    assert [(call["op"], call["arrived"], call["missing"]) for call in shown["inflight"]] == [
        ("all_reduce(sum, float32 x 4)", [1], [])
    ]
    assert shown["store"] == []
    async with listen(client, "?overview=true") as listener:
        kind, streamed = await listener.next()
        assert (kind, streamed["groups"]) == ("overview", shown["groups"])
        assert listener.last_id == str(registry.events.last)
