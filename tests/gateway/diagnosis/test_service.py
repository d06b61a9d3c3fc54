"""Diagnoses that the gateway makes: of agents that answer, that do not, and that answer nonsense."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from support.gateway_requests import Requests

from rankmesh_agent.diagnostics.snapshot import SnapshotServer
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.hello import Service
from rankmesh_agent.wire.schemas import StackFrame, ThreadStack
from rankmesh_agent.wire.snapshot import RankSnapshot, SnapshotCall, SnapshotGroup
from rankmesh_gateway.diagnosis import service
from rankmesh_gateway.state.registry import Registry

pytestmark = pytest.mark.anyio

TOKEN = "secret"
WORLD = "776f726c64000000"


def described(rank: int, waits: bool) -> RankSnapshot:
    """A rank of three that is in all_reduce #2, or has not come to it."""
    line = StackFrame("/home/me/train.py", 14 if waits else 8, "<module>" if waits else "load_batch", "", "user")
    inner = [StackFrame("reduce.py", 76, "all_reduce", "", "rankmesh")] if waits else []
    calls = [SnapshotCall(WORLD, 2, "all_reduce", "all_reduce(float32[8], SUM)", 40.0)] if waits else []
    return RankSnapshot(
        "job",
        1,
        rank,
        attached=False,
        groups=[SnapshotGroup(WORLD, "world", [0, 1, 2], 2 if waits else 1)],
        calls=calls,
        ended=[SnapshotCall(WORLD, 1, "all_reduce", "all_reduce(float32[8], SUM)", 41.0)],
        stacks=[ThreadStack("MainThread", 1, 1, False, [line, *inner])],
    )


@pytest.fixture(autouse=True)
def time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that answer have more time than usual: a busy machine's may pause."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 30.0)


class AgentDouble:
    """An agent that serves snapshots.

    Attributes:
        url: its address.
        taken: how many snapshots it was asked for.
    """

    def __init__(self, take: Callable[[], Any], service: Service = Service.SNAPSHOT) -> None:
        self.taken = 0

        def count() -> Any:
            self.taken += 1
            return take()

        listener = bind("127.0.0.1", 0, purpose="an agent's double listens")
        self.url = url_of(listener)
        self._server = HttpServer(listener)
        self._server.start(
            lambda: None,
            {service: SnapshotServer(lambda _: count(), lambda: Credentials(TOKEN, job="job"), service)},
            on_demand=True,
        )

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], Any]], AgentDouble]]:
    """Starts agents, of one service each."""
    made: list[AgentDouble] = []

    def start(take: Callable[[], Any], service: Service = Service.SNAPSHOT) -> AgentDouble:
        made.append(AgentDouble(take, service))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of an agent that does not answer: the kernel accepts the connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield url_of(listener)


def join(registry: Registry, ask: Requests, urls: list[str], job: str = "job") -> None:
    """Have ranks join whose agents are at these addresses."""
    for rank, url in enumerate(urls):
        request = ask.join(rank, len(urls))
        registry.join(replace(request, job=job, member=replace(request.member, http=url)))


async def test_the_findings(direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any):
    agents = [serve(lambda rank=rank: described(rank, rank != 2)) for rank in range(3)]
    join(registry, ask, [agent.url for agent in agents])
    answers = await asyncio.gather(*(direct.get("/v1/diagnosis") for _ in range(5)))
    assert [agent.taken for agent in agents] == [1, 1, 1], "the clients share a diagnosis"
    (found,) = {answer.text for answer in answers}
    document = json.loads(found)
    assert answers[0].headers["cache-control"] == "no-store"
    (finding,) = document["problems"]
    assert finding["text"] == (
        "rank 2 has not come to all_reduce #2 for 40.0 s; it is at train.py:8 in load_batch; ranks 0-1 wait at "
        "train.py:14"
    )
    assert (document["ok"], finding["ranks"], finding["kind"], finding["young"]) == (False, [2], "elsewhere", False)
    assert [(each["rank"], each["answers"]) for each in document["ranks"]] == [(0, True), (1, True), (2, True)]
    other = (await direct.get("/v1/diagnosis?job=other")).json()
    assert (other["ok"], other["problems"], other["ranks"]) == (True, [], [])
    assert (await direct.get("/v1/diagnosis", headers={"Authorization": "Bearer wrong"})).status_code == 401


async def test_the_ranks_that_make_the_others_wait(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any, deaf: str
):
    def recorded(rank: int) -> RankSnapshot:
        """Rank 1 comes 30 ms late to each of 20 calls, 100 ms apart, that end at the same moment."""
        late = 0.03 * (rank == 1)
        calls = [SnapshotCall(WORLD, 20 - n, "all_reduce", "", 0.1 * n, seconds=0.031 - late) for n in range(20)]
        return replace(described(rank, waits=False), ended=calls, monotonic=100.0)

    agents = [serve(lambda rank=rank: recorded(rank), Service.RECORDS) for rank in range(2)]
    for rank, url in enumerate([*(agent.url for agent in agents), deaf]):
        request = ask.join(rank, 3)
        registry.join(replace(request, member=replace(request.member, http=url, host="host")))
    found = (await direct.get("/v1/stragglers?patience=3")).json()
    assert found["silent"] == [{"rank": 2, "detail": "no answer within 3 s"}]
    (late,) = found["stragglers"]
    assert (late["job"], late["ranks"], late["last"], late["calls"], late["place"]) == (
        ("job", [1], 20, 20, "train.py:8 in load_batch")
    )
    assert late["why"] == "99 ms between two calls, where the others need 69 ms"
    assert (await direct.get("/v1/stragglers?seconds=0")).status_code == 422
    (found,) = (await direct.get("/v1/timelines?patience=3&seconds=1")).json()
    assert (found["job"], found["silent"]) == ("job", [{"rank": 2, "detail": "no answer within 3 s"}])
    (row,) = found["operations"]
    assert row | {"seconds": 0, "late": 0} == (
        {"group": "world", "call": "", "calls": 10, "seconds": 0, "bytes": 0, "slowest": 1, "late": 0}
    )
    assert (row["seconds"], row["late"]) == (pytest.approx(0.016, abs=1e-3), pytest.approx(0.3, abs=0.03))
    waits = {rank: sum(shares) / 120 for rank, shares in found["waits"].items()}
    assert waits == {"0": pytest.approx(0.3, abs=0.03), "1": 0.0}


async def test_a_diagnosis_is_made_anew(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "_MIN_AGE_SECONDS", 0.0)
    monkeypatch.setattr(service, "_AGE_PER_RANK_SECONDS", 0.0)
    waits = [True, True]
    agents = [serve(lambda rank=rank: described(rank, waits[rank])) for rank in range(2)]
    join(registry, ask, [agent.url for agent in agents])
    await direct.get("/v1/diagnosis")
    waits[0] = False
    assert [each["ranks"] for each in (await direct.get("/v1/diagnosis")).json()["problems"]] == [[0]]


async def test_a_slow_agent_delays_nothing_else(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any
):
    agent = serve(lambda: described(0, True))
    with socket.create_server(("127.0.0.1", 0)) as slow:
        slow.settimeout(60)
        join(registry, ask, [agent.url, url_of(slow)])
        diagnosis = asyncio.create_task(direct.get("/v1/diagnosis"))
        connection, _ = await asyncio.to_thread(slow.accept)
        with connection:
            assert (await direct.get("/v1/ranks/0/snapshot")).json()["answers"]
            assert not diagnosis.done(), "the other agent is still waited for"
    (finding,) = (await diagnosis).json()["problems"]
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("silent", [1], [0])
    assert finding["text"].startswith("rank 1 does not answer: ")


async def test_all_agents_have_a_limit(registry: Registry, ask: Requests, deaf: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rankmesh_gateway.diagnosis.snapshots._CONCURRENCY", 1)
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    join(registry, ask, [deaf] * 40)
    for limit in (0.5, 5.0):  # on a busy machine, the first may be over before an agent is asked
        monkeypatch.setattr(service, "_LIMIT", limit / 0.2)
        found = await service.DiagnosisService(registry, TOKEN, "here").diagnose()
        errors = [rank.error for rank in found.ranks]
        if errors[0] != errors[-1]:
            break
    assert errors[0] == "no answer within 0.2 s"
    assert errors[-1] == f"not asked: others have not answered within {limit:g} s"


async def test_a_rank(direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any):
    agent = serve(lambda: described(0, False))
    join(registry, ask, [agent.url])
    answer = await direct.get("/v1/ranks/0/snapshot")
    found = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert (found["rank"], found["answers"], found["error"]) == (0, True, "")
    assert found["place"] == "train.py:8 in load_batch"
    assert found["snapshot"] == json.loads(json.dumps(asdict(described(0, False))))
    assert (await direct.get("/v1/ranks/0/snapshot", headers={"Authorization": ""})).status_code == 401


async def test_the_ranks_of_a_job(direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any, deaf: str):
    join(registry, ask, [serve(lambda: described(0, False)).url, deaf])
    first, second = (await direct.get("/v1/ranks/snapshots?job=job&patience=5")).json()
    assert (first["rank"], first["place"], first["snapshot"]["rank"]) == (0, "train.py:8 in load_batch", 0)
    assert (second["rank"], second["error"], second["snapshot"]) == (1, "no answer within 5 s", None)
    assert [each["rank"] for each in (await direct.get("/v1/ranks/snapshots?rank=1&rank=7&patience=0.2")).json()] == [1]
    assert (await direct.get("/v1/ranks/snapshots?job=other")).json() == []
    for wrong in ("rank=x", "patience=0", "patience=61"):
        assert (await direct.get(f"/v1/ranks/snapshots?{wrong}")).status_code == 422


async def test_a_client_with_patience_gets_a_new_diagnosis(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any
):
    agent = serve(lambda: described(0, False))
    join(registry, ask, [agent.url])
    for count, query in enumerate(["", "?patience=30", "?patience=30", ""], 1):
        await direct.get(f"/v1/diagnosis{query}")
        assert agent.taken == min(count, 3)


async def test_a_rank_that_is_not_there(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, deaf: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    join(registry, ask, [deaf])
    missing = await direct.get("/v1/ranks/7/snapshot?job=job")
    assert (missing.status_code, missing.json()["code"]) == (404, "rank-not-found")
    assert missing.json()["detail"] == "there is no rank 7 of job 'job' here: GET /v1/ranks lists the ranks"
    join(registry, ask, [deaf], "other")
    several = await direct.get("/v1/ranks/0/snapshot")
    assert (several.status_code, several.json()["code"]) == (404, "rank-not-found")
    assert "a rank 0 in each of the jobs 'job', 'other': give one with ?job=" in several.json()["detail"]
    one = (await direct.get("/v1/ranks/0/snapshot?job=other")).json()
    assert (one["answers"], one["error"], one["snapshot"]) == (False, "no answer within 0.2 s", None)


async def test_an_agent_that_answers_nonsense(direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any):
    join(registry, ask, [serve(lambda: {"calls": 3}).url, serve(lambda: described(1, True)).url])
    found = (await direct.get("/v1/diagnosis")).json()
    assert [each["answers"] for each in found["ranks"]] == [False, True]
    assert "in a form that this gateway does not know" in found["ranks"][0]["error"]


def test_no_thread_remains(registry: Registry, ask: Requests, deaf: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    join(registry, ask, [deaf])
    asyncio.run(service.DiagnosisService(registry, TOKEN, "here").diagnose())
    deadline = time.monotonic() + 10
    while [thread for thread in threading.enumerate() if thread.name.startswith("rankmesh-diagnosis")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_rank_whose_world_is_not_complete(direct: httpx.AsyncClient, registry: Registry, ask: Requests):
    registry.join(ask.join(1, 2))
    found = (await direct.get("/v1/ranks/1/snapshot")).json()
    assert (found["state"], found["answers"], found["error"]) == ("joining", False, "it waits for its world to join")
    (finding,) = (await direct.get("/v1/diagnosis")).json()["problems"]
    assert finding["text"] == "job job waits for more ranks to join; rank 1 is there"


async def test_the_overview_has_the_findings_while_a_client_streams(
    direct: httpx.AsyncClient, registry: Registry, ask: Requests, serve: Any
):
    agents = [serve(lambda rank=rank: described(rank, rank != 1)) for rank in range(2)]
    join(registry, ask, [agent.url for agent in agents])
    assert (await direct.get("/v1/overview")).json()["problems"] == []
    assert [agent.taken for agent in agents] == [0, 0], "no client streams"
    await direct.get("/v1/diagnosis")
    assert [each["ranks"] for each in (await direct.get("/v1/overview")).json()["problems"]] == [[1]]
