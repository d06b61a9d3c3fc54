"""Jobs at one gateway, each with its credential: what one of them reads, changes and connects to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.attached import SECONDS, TOKEN, attach, gateway
from support.http_ranks import services
from support.me import GATEWAY, Me
from support.processes import Ranks, wait_until

import rankmesh as dist
from rankmesh_agent.agent import Agent
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.job_membership import JoinTerms
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.agent import RemoteAgent
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Get, Set
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import DistNetworkError, ForbiddenJobError
from rankmesh_gateway.diagnosis.snapshots import fetch_snapshot
from rankmesh_gateway.state.registry import Registry

LONG = "the token of a gateway"
_numbers = itertools.count()


class Jobs:
    """A gateway with two jobs of one rank: the first hosts its own, the second is attached to a standalone agent."""

    def __init__(self, url: str, agents: list[Standalone], registry: Registry) -> None:
        number = next(_numbers)
        self._registry = registry
        self.url = url
        self.names = f"first-{os.getpid()}-{number}", f"second-{os.getpid()}-{number}"
        self.tokens = tuple(for_job(TOKEN, name) for name in self.names)
        settings = Settings(token=self.tokens[0], job=self.names[0])
        self.first = Agent(settings, lambda: url, JoinTerms(0, 1, SECONDS, Deadline(SECONDS)), host="127.0.0.1")
        self.second: RemoteAgent = attach(agents[0], 0, 1, job=self.names[1], token=self.tokens[1])
        self.free = agents[1]

    @property
    def agents(self) -> tuple[str, str]:
        """URL of each job's agent."""
        return self.first.member.http, self.second.member.http

    @property
    def stores(self) -> list[bytes]:
        """Id of each job's store."""
        found = {job: bytes.fromhex(store) for store, job in self._registry.stores().items()}
        return [found[name] for name in self.names]

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    registry = Registry()
    with gateway(registry) as url, contextlib.ExitStack() as undo:
        agents = []
        for name in ("agent-0", "agent-1"):
            agent = Standalone(Settings(token=TOKEN), lambda: url, host="127.0.0.1", name=name)
            agent.start()
            undo.callback(agent.close)
            agents.append(agent)
        made = Jobs(url, agents, registry)
        undo.callback(made.close)
        wait_until(lambda: len(ask(url, "/v1/agents", TOKEN)) == 2, "the agents to register")
        wait_until(lambda: made.names[1] in json.dumps(ask(url, "/v1/agents", TOKEN)), "the lease to be reported")
        wait_until(lambda: len(ask(url, "/v1/groups", TOKEN)) == 2, "the groups to be reported")
        yield made


def ask(url: str, path: str, token: str, method: str = "GET", body: Any = None) -> Any:
    """Return the JSON or text of a response; raise HTTPError for an error."""
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), method=method)
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        text = response.read().decode()
    return json.loads(text) if "json" in response.headers["Content-Type"] else text


def refusal(url: str, path: str, token: str, method: str = "GET", body: Any = None) -> tuple[int, str]:
    """Return the status and code of the response, which is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, path, token, method, body)
    return caught.value.code, json.load(caught.value)["code"]


LISTS = [
    "/v1/jobs",
    "/v1/ranks",
    "/v1/agents",
    "/v1/groups",
    "/v1/groups/world",
    "/v1/groups/world/inflight",
    "/v1/waiting",
    "/v1/snapshot",
    "/v1/overview",
    "/v1/diagnosis",
    "/v1/stragglers",
    "/v1/timelines",
    "/v1/rates",
    "/v1/ranks/0/snapshot",
    "/metrics",
]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("own", [0, 1], ids=["first", "second"])
def test_a_jobs_credential_shows_its_part_of_every_list(jobs: Jobs, path: str, own: int):
    text = json.dumps(ask(jobs.url, path, jobs.tokens[own]))
    assert jobs.names[1 - own] not in text
    if path == "/v1/agents":
        assert jobs.free.name in text
        assert (jobs.names[1] in text) == bool(own)
    elif path not in ("/v1/waiting", "/v1/stragglers", "/v1/rates", "/v1/groups/world/inflight"):
        assert jobs.names[own] in text
    ask(jobs.url, f"{path}?job={jobs.names[own]}", jobs.tokens[own])
    for other in (f"job={jobs.names[1 - own]}", f"job={jobs.names[own]}&job={jobs.names[1 - own]}", "job="):
        assert refusal(jobs.url, f"{path}?{other}", jobs.tokens[own]) == (403, "forbidden-job")


@pytest.mark.parametrize("own", [0, 1], ids=["first", "second"])
def test_a_jobs_credential_shows_its_events_alone(jobs: Jobs, own: int):
    request = urllib.request.Request(f"{jobs.url}/v1/events?after=0&overview=true")
    request.add_header("Authorization", f"Bearer {jobs.tokens[own]}")
    seen = ""
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        while seen.count("event: overview") < 2:
            seen += response.readline().decode()
    assert '"world-complete"' in seen or "event: world-complete" in seen
    assert jobs.names[own] in seen
    assert jobs.names[1 - own] not in seen


def test_a_dashboards_session_is_of_the_job_of_the_credential(jobs: Jobs):
    for token, seen in ((jobs.tokens[0], 1), (TOKEN, 2)):
        code = ask(jobs.url, "/v1/dashboard/codes", token, "POST")["code"]
        session = ask(jobs.url, "/v1/dashboard/sessions", code, "POST")["token"]
        assert len({each["job"] for each in ask(jobs.url, "/v1/ranks", session)}) == seen
        if token != TOKEN:
            assert refusal(jobs.url, f"/v1/ranks?job={jobs.names[1]}", session) == (403, "forbidden-job")
        assert refusal(jobs.url, "/v1/groups/world/abort", session, "POST") == (403, "forbidden-role")


def test_a_job_is_not_changed_with_anothers_credential(jobs: Jobs):
    """By requests that are complete, and are answered without the web framework."""
    first, second = jobs.names
    goodbye = {"job": second, "epoch": 1, "rank": 0, "instance": jobs.second.member.instance, "reason": "killed"}
    rank = {"job": second, "epoch": 1, "world_size": 1, "member": vars(jobs.first.member)}
    for path, body in [
        ("/v1/leave", goodbye),
        ("/v1/heartbeat", rank),
        ("/v1/join", {"job": second, "world_size": 1, "member": vars(jobs.first.member)}),
        ("/v1/ended", {"job": second, "epoch": 1}),
        ("/v1/members", {"job": second, "epoch": 1, "ranks": [0]}),
        ("/v1/leases", {"job": second, "rank": 0, "world_size": 1}),
        ("/v1/groups", {"job": second, "ranks": [0]}),
        ("/v1/groups", {"ranks": [0]}),
        (f"/v1/groups/world/abort?job={second}", {"reason": "not yours"}),
    ]:
        assert refusal(jobs.url, path, jobs.tokens[0], "POST", body) == (403, "forbidden-job"), path
    group = f"{jobs.second.world.id:016x}"
    assert refusal(jobs.url, f"/v1/groups/{group}/abort", jobs.tokens[0], "POST") == (404, "group-not-found")
    (rank,) = ask(jobs.url, f"/v1/ranks?job={second}", TOKEN)
    assert rank["state"] in ("alive", "suspect")
    assert jobs.second.world.failure is None
    assert refusal(jobs.url, "/v1/agents/leave", jobs.tokens[0], "POST", {"id": "x"}) == (403, "forbidden-job")
    assert ask(jobs.url, "/v1/groups", jobs.tokens[0], "POST", {"job": first, "ranks": [0]})["job"] == first


@pytest.mark.parametrize("own", [0, 1], ids=["embedded", "attached"])
def test_anothers_credential_opens_no_agent_of_a_job(jobs: Jobs, own: int):
    """Not over HTTP, nor its stacks. The embedded agent knows no credential but its job's."""
    right, other, url = jobs.tokens[own], jobs.tokens[1 - own], jobs.agents[own]
    refused = [(401, "unauthenticated"), (403, "forbidden-job")][own]
    for path in ("/v1/info", "/v1/stacks", "/v1/flight-recorder", "/v1/store", "/metrics"):
        assert refusal(url, path, other) == refused
        ask(url, path, right)
    assert refusal(url, "/v1/store/k", other, "PUT", "v") == refused
    assert refusal(url, "/v1/groups/world/abort", other, "POST") == refused
    with pytest.raises(DistNetworkError):
        fetch_snapshot(url, other, SECONDS)
    assert fetch_snapshot(url, right, SECONDS)


@pytest.mark.parametrize("own", [0, 1], ids=["embedded", "attached"])
def test_a_jobs_store_opens_for_its_credential_alone(jobs: Jobs, own: int):
    """Under its id alone, too."""
    right, other, store = jobs.tokens[own], jobs.tokens[1 - own], jobs.stores[own]
    with contextlib.closing(StoreClient(jobs.url, right, store)) as client:
        client.execute(Set("key", b"its own"), SECONDS)
        for token, named in ((other, store), (right, jobs.stores[1 - own]), (right, b"?" * 16), ("", store)):
            with contextlib.closing(StoreClient(jobs.url, token, named)) as stranger, pytest.raises(DistNetworkError):
                stranger.execute(Set("key", b"not its own"), SECONDS)
        assert client.execute(Get("key"), SECONDS) == b"its own"


def test_a_free_agent_is_leased_for_the_job_of_the_credential_alone(jobs: Jobs):
    first, second = jobs.names
    url = jobs.free.urls[0]
    assert refusal(url, "/v1/lease", jobs.tokens[0], "POST", {"job": second, "world_size": 1}) == (403, "forbidden-job")
    assert refusal(url, "/v1/info", jobs.tokens[0]) == (503, "not-leased")
    with pytest.raises(ForbiddenJobError, match=f"{first!r}.*{second!r}.*RANKMESH_JOB={first}"):
        attach(jobs.free, 0, 1, job=second, token=jobs.tokens[0])
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(jobs.agents[1], "/v1/lease", jobs.tokens[0], "POST", {"job": first, "world_size": 1})
    problem = json.load(caught.value)
    assert (problem["code"], "by another job" in problem["detail"]) == ("agent-taken", True)
    assert second not in problem["detail"]
    assert refusal(jobs.url, "/v1/agents", jobs.tokens[0], "POST", {}) == (403, "forbidden-job")


def meet(me: Me) -> None:
    me.init()
    array = np.full(1000, me.rank + 1.0)
    dist.all_reduce(array)
    assert (array == me.size * (me.size + 1) / 2).all()
    gathered: list[Any] = [None] * me.size
    dist.all_gather_object(gathered, {me.rank})  # a set: pickled, which only ranks with a token do
    assert gathered == [{rank} for rank in range(me.size)]
    dist.destroy_process_group()


@pytest.mark.processes
def test_ranks_with_the_jobs_credential_alone_are_a_job(ranks: Ranks):
    """At a gateway and a standalone agent that have the token; of the ranks one has the token itself."""

    def variables(rank: int) -> dict[str, str]:
        token = LONG if rank == 1 else for_job(LONG, ranks.job)
        job = ranks.job if rank == 1 else ""  # the credential names it, too
        kind = "embedded" if rank else "attached"
        return {"RANKMESH_TOKEN": token, "RANKMESH_JOB": job, "RANKMESH_HOSTING": kind, GATEWAY: url}

    with services(ranks, 1, RANKMESH_TOKEN=LONG) as (url, _):
        ranks.run(meet, 3, env=variables)


@pytest.mark.processes
def test_ranks_with_the_jobs_credential_alone_host_their_gateway(ranks: Ranks):
    ranks.run(meet, 2, env={"RANKMESH_TOKEN": for_job(LONG, ranks.job)})


def fail(me: Me) -> None:
    with pytest.raises(ForbiddenJobError, match="RANKMESH_TOKEN is the credential of job 'another'"):
        me.init()


@pytest.mark.processes
def test_a_rank_does_not_join_with_the_credential_of_another_job(ranks: Ranks):
    ranks.run(fail, 1, env={"RANKMESH_TOKEN": for_job(LONG, "another")})
