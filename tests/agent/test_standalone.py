"""A standalone agent: free, leased, in a job, and free again; in this process, and as one of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
from support.attached import TOKEN, gateway, in_thread
from support.pauses import despite_pauses
from support.processes import Ranks, wait_until

from rankmesh_agent.__main__ import main
from rankmesh_agent.agent import Agent
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.options import Options
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    DistNetworkError,
    JoinTimeoutError,
    LeaseEndedError,
    NotLeasedError,
)
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.schemas import UNASSIGNED, JoinRequest, Lease, LeaseTerms, Member
from rankmesh_gateway.state.registry import Registry

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def wanted(rank: int = UNASSIGNED, world_size: int = 1, **options: object) -> LeaseTerms:
    fields = {"job": "job", "timeout": 30.0, "holder": "a test", **options}
    return LeaseTerms(rank=rank, world_size=world_size, **fields)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.fixture(scope="module")
def gateway_url(registry) -> Iterator[str]:
    with gateway(registry) as url:
        yield url


Made = Callable[..., Standalone]


@pytest.fixture
def make(gateway_url) -> Iterator[Made]:
    made = []

    def make(name: str = "agent-0", **options: object) -> Standalone:
        agent = Standalone(Settings(token=TOKEN), lambda: gateway_url, host="127.0.0.1", name=name, **options)
        made.append(agent)
        agent.start()
        return agent

    yield make
    for agent in made:
        agent.close()
    ours = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("rankmesh")]  # noqa: E731
    wait_until(lambda: not ours(), "the threads to end")


def acquire(agent: Standalone, terms: LeaseTerms) -> tuple[Lease, Agent]:
    """Lease an agent; returns when it has joined."""
    active = agent.leases.acquire(terms)
    return active.lease, active.joining.result(60)


def world_of_two(*agents: Standalone) -> list[tuple[Lease, Agent]]:
    futures = [in_thread(acquire, agent, wanted(rank, 2)) for rank, agent in enumerate(agents)]
    return [future.result(60) for future in futures]


class TestLeases:
    def test_a_world_of_leased_agents_computes(self, make):
        pairs = world_of_two(make("agent-0"), make("agent-1"))
        arrays = [np.full(1000, rank + 1.0) for rank in range(2)]
        calls = [
            in_thread(agent.world.all_reduce, array, ReduceOp.SUM, Options(20.0))
            for (_, agent), array in zip(pairs, arrays, strict=True)
        ]
        for call in calls:
            call.result(60)
        assert all((array == 3).all() for array in arrays)

    def test_the_gateway_hears_that_its_connections_are_watched(self, make, registry):
        """So a process that is stopped does not count as failed while its peers are connected to it."""
        (_, agent), _ = world_of_two(make("agent-0"), make("agent-1"))
        records = registry._jobs["job"].epochs[agent.info().epoch].records.values()
        wait_until(lambda: all(record.watches_peers for record in records), "a heartbeat of each")

    def test_a_rank_that_connects_to_its_peers_is_alive(self, make, registry, monkeypatch):
        """That may take longer than a rank may be silent."""
        monkeypatch.setattr("rankmesh_agent.membership.heartbeats.HEARTBEAT_SECONDS", 0.01)
        agent, peer = make(), Member(1, "never connects", "elsewhere", "another host", 1, ["127.0.0.1:1"], "http://x")
        joining = in_thread(acquire, agent, wanted(0, 2, job="slow", timeout=3.0))
        wait_until(lambda: registry.ranks("slow"), "the rank to come")
        registry.join(JoinRequest("slow", 2, peer))
        record = registry._jobs["slow"].epochs[1].records[0]
        wait_until(lambda: record.reported_at, "a heartbeat")
        with pytest.raises(DistNetworkError):
            joining.result(60)
        assert record.ended == "failed"

    def test_it_is_free_again_for_another_rank_and_job(self, make):
        agent = make()
        for job in ("one", "two", "one"):
            lease, joined = acquire(agent, wanted(UNASSIGNED, job=job))
            assert (lease.job, lease.rank, joined.member.rank, joined.world.size) == (job, 0, 0, 1)
            assert agent.leases.lease == lease
            assert agent.leases.release(lease.id)
            assert agent.leases.lease is None
            assert not agent.leases.release(lease.id)

    def test_one_lease_at_a_time(self, make):
        agent = make()
        acquire(agent, wanted(holder="python train.py"))
        with pytest.raises(AgentTakenError, match=r"'agent-0' is taken, by rank 0 of job 'job' \(python train.py\)"):
            agent.leases.acquire(wanted())

    def test_a_join_that_fails_frees_it(self, make):
        agent = make()

        @despite_pauses
        def fail():
            with pytest.raises(JoinTimeoutError, match="rank 1"):
                acquire(agent, wanted(0, 2, timeout=0.2))

        fail()
        assert agent.leases.lease is None
        acquire(agent, wanted())

    def test_a_lease_that_ends_while_it_joins(self, make, registry):
        agent = make()
        joining = in_thread(acquire, agent, wanted(0, 2, job="halfway"))
        wait_until(lambda: registry.ranks("halfway"), "the rank to come")
        assert agent.leases.release(agent.leases.lease.id, "its process went away")
        with pytest.raises(LeaseEndedError, match="its process went away"):
            joining.result(60)
        assert not registry.ranks("halfway")
        assert agent.leases.lease is None

    @pytest.mark.parametrize("reason", ["its process (pid 7) ended", "its agent ended"])
    def test_its_peers_report_why_it_left(self, make, reason):
        agents = make("agent-0"), make("agent-1")
        pairs = world_of_two(*agents)
        waiting = in_thread(pairs[0][1].world.barrier, Options(20.0))
        if reason == "its agent ended":
            agents[1].close()
            with pytest.raises(AgentTakenError, match="about to end"):
                acquire(agents[1], wanted())
        else:
            assert agents[1].leases.release(pairs[1][0].id, reason)
        with pytest.raises(RuntimeError, match=rf"rank 1 .* left \({re.escape(reason)}\)"):
            waiting.result(60)

    def test_one_that_nobody_uses_ends(self, make):
        agent = make()
        with contextlib.suppress(LeaseEndedError):  # it may be over before the caller has it
            acquire(agent, wanted(idle=0.2))
        wait_until(lambda: agent.leases.lease is None, "the lease to end")

    def test_descriptors_and_threads_go_with_the_lease(self, make):
        agent = make()
        lease, _ = acquire(agent, wanted())
        agent.leases.release(lease.id)
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(10):
            lease, _ = acquire(agent, wanted())
            agent.leases.release(lease.id)
        wait_until(lambda: threading.active_count() <= threads, "the threads to end")
        # Connections to the gateway come and go at both ends; one that a lease had left would be there ten times.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) < descriptors + 10, "the descriptors to be closed")


class TestFace:
    def test_a_free_one(self, make):
        agent = make(urls=["http://elsewhere.example:8701/"])
        assert (agent.health().status, agent.health().rank) == ("ok", UNASSIGNED)
        assert (agent.info().job, agent.info().member.instance) == ("", agent.id)
        assert agent.groups() == []
        assert agent.urls[-1] == "http://elsewhere.example:8701"
        with pytest.raises(NotLeasedError, match="'agent-0' is in no job yet"):
            agent.leases.state()
        with httpx.Client(base_url=agent.urls[0], headers=HEADERS, timeout=30) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/health", headers={"Host": "elsewhere.example:8701"}).status_code == 200
            assert client.get("/health", headers={"Host": "agent-0"}).status_code == 200
            assert client.get("/health", headers={"Host": "stranger.example"}).status_code == 421
            refused = client.get("/v1/store/key")
            assert (refused.status_code, refused.json()["code"]) == (503, "not-leased")

    def test_a_leased_one_over_http(self, make):
        agents = make("agent-0"), make("agent-1")
        clients = [httpx.Client(base_url=agent.urls[0], headers=HEADERS, timeout=30) for agent in agents]
        asked = {"world_size": 2, "job": "http", "rank": 1, "wait": 0.0}
        first = clients[1].post("/v1/lease", json=asked)
        assert (first.status_code, first.json()["state"]) == (202, "joining")
        again = clients[1].post("/v1/lease", json=asked)
        assert (again.status_code, again.json()["code"]) == (409, "agent-taken")
        second = clients[0].post("/v1/lease", json={**asked, "rank": 0, "wait": 20.0})
        assert (second.status_code, second.json()["state"]) == (201, "joined")
        assert clients[1].get("/v1/lease", params={"wait": 20}).json()["state"] == "joined"
        assert clients[1].get("/health").json()["rank"] == 1
        clients[1].put("/v1/store/key", content=b"value").raise_for_status()
        assert clients[0].get("/v1/store/key").content == b"value"
        for client in clients:
            assert client.delete("/v1/lease").status_code == 200
            assert client.delete("/v1/lease").json()["code"] == "not-leased"
            gone = client.delete("/v1/lease", params={"id": "another"})
            assert (gone.status_code, gone.json()["code"]) == (410, "lease-ended")
            client.close()

    @despite_pauses
    def test_a_request_that_fails(self, make):
        url = f"{make().urls[0]}/v1/lease"
        wrong = [{}, {"world_size": 0}, {"world_size": 1, "rank": -2}, {"world_size": "x"}]
        for body, status, code, detail in [
            *[(body, 422, "invalid-request", "") for body in wrong],
            ({"world_size": 2, "rank": 5}, 422, "invalid-request", "rank 5 is not in a world of 2"),
            ({"world_size": 2, "rank": 1, "job": "alone", "timeout": 0.2}, 504, "join-timeout", "rank 0"),
        ]:
            answer = httpx.post(url, json=body, headers=HEADERS, timeout=30)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert detail in answer.json()["detail"]
        assert answer.json()["ranks"] == [0]

    def test_a_client_that_goes_away_while_it_joins(self, make):
        agent = make()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{agent.urls[0]}/v1/lease", json={"world_size": 2}, headers=HEADERS, timeout=0.5)
        wait_until(lambda: agent.leases.lease is None, "the lease to end")


@pytest.mark.processes
class TestProcess:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_serves_until_a_signal(self, ranks: Ranks, gateway: str, number: int):
        arguments = ["--gateway", gateway, "--port", "0", "--name", "agent-7"]
        process = ranks.command("-m", "rankmesh_agent", *arguments, name="agent")
        found = wait_until(lambda: re.search(r"agent-7 is ready at (http://\S+),", process.stdout), "the agent")
        url = found[1]
        wait_until(lambda: _answers(url), "the agent to answer")
        httpx.post(f"{url}/v1/lease", json={"world_size": 1}, timeout=30).raise_for_status()
        process.kill(number)
        ranks.wait([process])
        assert process.code == 0
        lines = [re.sub(r"^\S+ ", "", line) for line in process.stderr.splitlines()]
        holder = "by rank 0 of job 'default' (an HTTP client at 127.0.0.1)"
        assert [line for line in lines if "agent-7" in line or "rank 0" in line] == [
            f"INFO agent 'agent-7' is leased {holder.replace('rank 0', 'a rank')}",
            "INFO rank 0 of job 'default' has joined: all 1 ranks are there",
            f"INFO the lease of agent 'agent-7' {holder} has ended: its agent was stopped by a signal",
        ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no gateway: give --gateway"),
        (["--gateway", "localhost:8700"], "is no URL of the form http://host:port"),
        (["--gateway", "http://localhost:8700:"], "is no URL of the form http://host:port"),
        (["--gateway", "http://127.0.0.1:9", "--host", "0.0.0.0"], "without a token"),
        (["--gateway", "http://127.0.0.1:9", "--token-file", "/nowhere"], "No such file"),
        (["--gateway", "http://127.0.0.1:9", "--port", "x"], "'x' is not a port"),
    ],
)
def test_an_agent_that_cannot_start_exits_with_2_and_the_reason(arguments, reason, capsys, monkeypatch):
    monkeypatch.delenv("RANKMESH_GATEWAY", raising=False)
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert reason in capsys.readouterr().err


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        time.sleep(0.05)
        return False
