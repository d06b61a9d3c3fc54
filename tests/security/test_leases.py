"""A lease of a standalone agent is a credential for its rank alone."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from support.attached import SECONDS, TOKEN, attach, gateway, offer
from support.http_ranks import from_npy, npy

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.stream import StreamClosedError
from rankmesh_agent.remote.client import AgentDialer, error_in
from rankmesh_agent.remote.codec import encode
from rankmesh_agent.remote.requests import Acquire, FailedRanks, Request
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Kind
from rankmesh_agent.wire.credentials import Grant, Role, derive, for_job, for_lease
from rankmesh_agent.wire.errors import AgentTakenError, AuthenticationError, ForbiddenJobError
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.schemas import LeaseTerms
from rankmesh_gateway.state.registry import Registry

UNKNOWN = "ab" * 16
_jobs = (f"leased-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def agents() -> Iterator[list[Standalone]]:
    with gateway(Registry()) as url:
        made = [Standalone(Settings(token=TOKEN), lambda: url, host="127.0.0.1", name=f"agent-{n}") for n in range(2)]
        for agent in made:
            agent.start()
        yield made
        for agent in made:
            agent.close()


@pytest.fixture
def job() -> str:
    return next(_jobs)


def client(agent: Standalone, credential: str) -> httpx.Client:
    """Return an HTTP client of an agent, with a credential."""
    return httpx.Client(
        base_url=agent.urls[0], headers={"Authorization": f"Bearer {credential}"}, timeout=SECONDS, trust_env=False
    )


@contextlib.contextmanager
def leased(agent: Standalone, job: str) -> Iterator[tuple[str, str]]:
    """Lease an agent over HTTP with the job's credential; yield this, and the lease's id."""
    own = for_job(TOKEN, job)
    with client(agent, own) as holder:
        taken = holder.post("/v1/lease", json={"job": job, "world_size": 1})
        assert taken.status_code == 201, taken.text
        lease = taken.json()["lease"]["id"]
        yield own, lease
        holder.delete("/v1/lease", params={"id": lease})


def first_response(dialer: AgentDialer, request: Request[Any]) -> bytes | bytearray:
    """Return the result of the first request on a stream; raise the error that it is."""
    stream = dialer.connect(Deadline(SECONDS))
    try:
        stream.send(attach_frames.encode(Kind.REQUEST, encode(request)))
        frame = stream.receive(Deadline(SECONDS), descriptors=True)
        for descriptor in frame.descriptors:
            os.close(descriptor)
    finally:
        stream.close()
    if frame.header.kind != Kind.OK:
        raise error_in(frame)
    return frame.document


def test_the_streams_of_a_lease_need_its_id_and_its_jobs_credential(agents: list[Standalone], job: str):
    """Not the credential of another job, with the lease's id."""
    agent, own = agents[0], for_job(TOKEN, job)
    attached = attach(agent, 0, 1, job=job)
    try:
        lease = agent.leases.lease
        assert lease is not None
        unleased = AgentDialer(offer(agent), "", job, own)
        with pytest.raises(StreamClosedError):
            first_response(unleased, FailedRanks())
        of_another = AgentDialer(offer(agent), "", job, own)
        of_another.use_lease(UNKNOWN)
        with pytest.raises(StreamClosedError):
            first_response(of_another, FailedRanks())
        for foreign, credential in [
            ("another job", for_job(TOKEN, "another job")),
            (job, own.replace(own[-4:], "0000")),
        ]:
            stranger = AgentDialer(offer(agent), "", foreign, credential)
            stranger.use_lease(lease.id)
            with pytest.raises((StreamClosedError, AuthenticationError)):
                first_response(stranger, FailedRanks())
        right = AgentDialer(offer(agent), "", job, own)
        right.use_lease(lease.id)
        assert first_response(right, FailedRanks()) == encode([])
    finally:
        attached.close("")


def test_a_client_cannot_take_the_place_of_a_lease_by_its_id(agents: list[Standalone], job: str):
    """Its id is the agent's: a request that names it ends no lease, and takes none over."""
    agent = agents[0]
    attached = attach(agent, 0, 1, job=job)
    try:
        lease = agent.leases.lease
        assert lease is not None
        for foreign in (job, "another job"):
            dialer = AgentDialer(offer(agent), "", foreign, for_job(TOKEN, foreign))
            with pytest.raises(AgentTakenError):
                first_response(dialer, Acquire(LeaseTerms(foreign, 0, 1, 5.0, "a thief")))
        with pytest.raises(ForbiddenJobError):
            first_response(dialer, Acquire(LeaseTerms(job, 0, 1, 5.0, "a thief")))
        assert agent.leases.lease == lease
        array = np.ones(3)
        attached.world.all_reduce(array, ReduceOp.SUM, Options(SECONDS))
        assert attached.world.failure is None
    finally:
        attached.close("")


def test_the_credential_of_a_lease_opens_its_rank_and_nothing_else(agents: list[Standalone], job: str):
    """Nor does one of the role use take the part of a rank that it has not leased."""
    body, kind = npy(np.arange(4.0)), {"Content-Type": "application/x-npy"}
    with leased(agents[0], job) as (own, lease), leased(agents[1], next(_jobs)) as (_, other):
        ours = for_lease(own, job, lease)
        with client(agents[0], ours) as rank:
            done = rank.post("/v1/groups/world/all_reduce", content=body, headers=kind)
            assert done.status_code == 200, done.text
            assert (from_npy(done.content) == np.arange(4.0)).all()
            assert rank.put("/v1/store/k", content=b"v").status_code in (201, 204)
            assert rank.get("/v1/lease").json()["lease"]["id"] == lease
            assert rank.get("/v1/groups").status_code == 200
            for method, path in [
                ("POST", "/v1/lease"),
                ("POST", "/v1/groups"),
                ("DELETE", "/v1/groups/world"),
                ("POST", "/v1/groups/world/abort"),
                ("GET", "/v1/stacks"),
                ("POST", "/v1/probe"),
            ]:
                refused = rank.request(method, path, json={"job": job, "world_size": 1})
                assert (refused.status_code, refused.json()["code"]) == (403, "forbidden-role"), path
        for credential, code in [
            (derive(own, Role.USE), "forbidden-role"),
            (derive(TOKEN, Role.USE), "forbidden-role"),
            (for_job(TOKEN, "another job"), "forbidden-job"),
            (for_lease(own, job, UNKNOWN), "forbidden-job"),
            (for_lease(own, job, other), "forbidden-job"),
        ]:
            with client(agents[0], credential) as stranger:
                for method, path in [
                    ("POST", "/v1/groups/world/all_reduce"),
                    ("GET", "/v1/lease"),
                    ("DELETE", "/v1/lease"),
                    ("DELETE", f"/v1/lease?id={lease}"),
                ]:
                    refused = stranger.request(method, path, content=body if method == "POST" else None, headers=kind)
                    assert (refused.status_code, refused.json()["code"]) == (403, code), (credential, path)
        with client(agents[1], ours) as elsewhere:
            refused = elsewhere.post("/v1/groups/world/all_reduce", content=body, headers=kind)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden-job")
            assert elsewhere.get("/v1/lease").json()["code"] == "forbidden-job"
        with client(agents[0], ours) as rank:
            assert rank.delete("/v1/lease", params={"id": other}).json()["code"] == "lease-ended"
            assert rank.delete("/v1/lease").status_code == 200
            assert rank.get("/v1/info").json()["code"] == "not-leased"
    with leased(agents[0], job), client(agents[0], ours) as rank:
        assert rank.get("/v1/info").json()["code"] == "forbidden-job", "of the lease before"


@pytest.mark.parametrize("of_lease", [False, True], ids=["the job's", "the lease's"])
def test_a_request_does_not_outlast_the_lease_that_it_began_in(agents: list[Standalone], job: str, of_lease: bool):
    """One whose body comes when the agent is leased for another job changes nothing of that."""
    split, body = urlsplit(agents[0].urls[0]), b'{"values": {"key": "dGhlZnQ="}}'
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=SECONDS)
    with contextlib.closing(connection):
        with leased(agents[0], job) as (own, lease):
            credential = for_lease(own, job, lease) if of_lease else own
            connection.putrequest("POST", "/v1/store/multi_set")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Authorization", f"Bearer {credential}")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:5])
            with client(agents[0], own) as holder:  # the request above has begun before this one ends
                assert holder.put("/v1/store/mine", content=b"").status_code in (201, 204)
        with leased(agents[0], next(_jobs)) as (other, _):
            connection.send(body[5:])
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())["code"]) == (403, "forbidden-job")
            with client(agents[0], other) as holder:
                assert holder.get("/v1/store").json() == []


def test_a_snapshot_does_not_outlast_the_lease_that_its_request_began_in(agents: list[Standalone], job: str):
    """The agent may be leased for another job between the proof of a credential and the snapshot."""
    with leased(agents[0], job):
        assert agents[0]._snapshot(Grant(Role.RUN, job)) is not None
        with pytest.raises(ForbiddenJobError):
            agents[0]._snapshot(Grant(Role.RUN, "the job before"))
