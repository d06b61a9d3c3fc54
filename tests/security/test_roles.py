"""Every endpoint of every service, as its OpenAPI document lists them.

Under no, a wrong and each role's credential, and under those of its and of another job.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.served_store import ServedStore
from support.views import FakeAgent

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.wire.credentials import ROLES, Credentials, Role, derive, for_job
from rankmesh_agent.wire.schemas import Lease, LeaseState
from rankmesh_gateway.http.app import create_app as create_gateway

TOKEN = "secret"
JOB, OTHER_JOB = "train", "someone else's: 50 %"


class LeasedAgent(FakeAgent):
    """A standalone agent that is leased for JOB."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(job=JOB)

    def state(self) -> LeaseState:
        return LeaseState(Lease("ab" * 16, JOB, 0, 2, "a client"), "joined")


SERVICES: dict[str, Any] = {
    "agent": lambda: create_app(LeasedAgent(), token=TOKEN, leases=LeasedAgent()),
    "rank": lambda: create_app(LeasedAgent(), token=TOKEN),
    "store": lambda: create_store_app(ServedStore(), token=TOKEN),
    "gateway": lambda: create_gateway(token=TOKEN),
}
OPEN = {"/health", "/livez", "/readyz", "/", "/dashboard/{name}"}
PART = "icon.svg"
"""A part of the dashboard."""
_AGENT = (
    "/metrics /v1/info /v1/groups /v1/groups/{group_id} /v1/groups/{group_id}/inflight /v1/flight-recorder "
    "/v1/host /v1/probe"
)
READ = {
    "agent": _AGENT,
    "rank": _AGENT,
    "gateway": "/metrics /v1/jobs /v1/ranks /v1/agents /v1/groups /v1/groups/{group} /v1/groups/{group}/inflight "
    "/v1/waiting /v1/snapshot /v1/events /v1/overview /v1/rates /v1/diagnosis /v1/stragglers /v1/timelines",
    "store": "",
}


def needed(service: str, method: str, path: str) -> Role | None:
    """The role that an endpoint should need: ``run`` unless it is named here."""
    if path in OPEN:
        return None
    if method == "GET" and path in READ[service].split():
        return Role.READ
    if path.startswith("/v1/dashboard/"):
        return Role.READ
    if path.startswith("/v1/store"):
        return Role.USE
    if service == "agent" and path == "/v1/lease" and method != "POST":
        return Role.LEASE
    if service in ("agent", "rank") and method == "POST" and path.startswith("/v1/groups/{group_id}/"):
        return Role.RUN if path.endswith("/abort") else Role.USE if service == "rank" else Role.LEASE
    return Role.RUN


async def statuses(service: str) -> list[str]:
    """Return what differs from the roles above."""
    app, wrong = SERVICES[service](), []
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        authorized = {"Authorization": f"Bearer {TOKEN}"}
        document = (await client.get("/openapi.json", headers=authorized)).json()
        assert len(document["paths"]) > 5
        endpoints = [(method.upper(), path) for path, found in document["paths"].items() for method in found]
        for method, path in endpoints:
            role = needed(service, method, path)
            asked = path.replace("{name}", PART).replace("{", "").replace("}", "")
            for held in (None, *ROLES):
                credential = "guess" if held is None else Credentials(TOKEN).of_role(held)
                headers = {"Authorization": f"Bearer {credential}", "Content-Length": str(1 << 40)}
                answer = await client.request(method, asked, headers=headers)
                # A request that is let in is rejected because of its length: no endpoint is run.
                if role is None or (held is not None and held >= role):
                    expected = (413, "body-too-large")
                elif held is None:
                    expected = (401, "unauthenticated")
                else:
                    expected = (403, "forbidden-role")
                if (answer.status_code, answer.json()["code"]) != expected:
                    wrong.append(f"{method} {path} with {held}: {answer.status_code}, not {expected}")
            if role is not None and (await client.request(method, asked)).status_code != 401:
                wrong.append(f"{method} {path} without a credential")
    return wrong


@pytest.mark.parametrize("service", SERVICES)
def test_every_endpoint_needs_its_role(service):
    assert asyncio.run(statuses(service)) == []


SPANNING = {("POST", "/v1/agents"), ("POST", "/v1/agents/leave")}
"""Endpoints of the gateway that are not for one job."""


OF_NO_JOB = {("POST", "/v1/dashboard/codes"), *((each, "/v1/dashboard/sessions") for each in ("POST", "DELETE"))}
"""Endpoints of the gateway without a job's data: a session of the dashboard has the job of the credential."""


async def answers_to_jobs(service: str, job: str, credential: str, **options: Any) -> dict[tuple[str, str], Any]:
    """Return the status and code of each endpoint's response to a request for a job, with a credential."""
    app, answers = SERVICES[service](), {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        document = (await client.get("/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})).json()
        for path, found in document["paths"].items():
            for method in map(str.upper, found):
                headers = {"Authorization": f"Bearer {credential}", **options}
                body = {"job": job, "world_size": 2}
                asked = path.replace("{name}", PART).replace("{", "").replace("}", "")
                if path in OPEN:
                    continue
                answer = await client.request(method, asked, params={"job": job}, json=body, headers=headers)
                answers[method, path] = answer.status_code, answer.json().get("code")
    return answers


@pytest.mark.parametrize("service", SERVICES)
def test_another_jobs_credential_opens_no_endpoint(service):
    """Of whatever role; nor does one of this job whose key has been changed."""
    for role in ROLES:
        other = derive(for_job(TOKEN, OTHER_JOB), role)
        answers = asyncio.run(answers_to_jobs(service, JOB, other))
        answers = {endpoint: answer for endpoint, answer in answers.items() if endpoint not in OF_NO_JOB}
        refused = {(403, "forbidden-job")} if role is Role.RUN else {(403, "forbidden-job"), (403, "forbidden-role")}
        assert set(answers.values()) <= refused, {each: why for each, why in answers.items() if why not in refused}
    guess = for_job(TOKEN, JOB)[:-1] + ("0" if for_job(TOKEN, JOB)[-1] != "0" else "1")
    assert set(asyncio.run(answers_to_jobs(service, JOB, guess)).values()) == {(401, "unauthenticated")}


@pytest.mark.parametrize("service", SERVICES)
def test_a_jobs_credential_opens_the_endpoints_of_its_job(service):
    """With its role, those alone that name the job, so that a new endpoint is closed to it."""
    for role in ROLES:
        length = {"Content-Length": str(1 << 40)}  # a request that is let in is rejected because of it
        answers = asyncio.run(answers_to_jobs(service, JOB, derive(for_job(TOKEN, JOB), role), **length))
        for (method, path), answer in answers.items():
            if needed(service, method, path) > role:
                assert answer == (403, "forbidden-role"), (method, path)
            elif service == "store" or (method, path) in SPANNING:
                assert answer == (403, "forbidden-job"), (method, path)
            else:
                assert answer == (413, "body-too-large"), (method, path)


@pytest.mark.parametrize("service", SERVICES)
def test_an_endpoint_that_nobody_has_thought_of_is_closed_to_jobs(service):
    async def status(path: str) -> int:
        transport = httpx.ASGITransport(SERVICES[service](), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
            credential = for_job(TOKEN, JOB if service in ("store", "gateway") else OTHER_JOB)
            return (await client.get(path, headers={"Authorization": f"Bearer {credential}"})).status_code

    for path in ("/v1/new", "/v1/groups/a/b/c", "/v1/storage", "/v1/jobs/x"):
        assert asyncio.run(status(path)) == 403


def test_an_error_names_both_jobs_and_the_remedy():
    async def detail() -> str:
        transport = httpx.ASGITransport(SERVICES["gateway"]())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
            headers = {"Authorization": f"Bearer {for_job(TOKEN, JOB)}"}
            return (await client.get("/v1/ranks?job=other", headers=headers)).json()["detail"]

    found = asyncio.run(detail())
    assert f"is that of job {JOB!r}, and the request is for job 'other'" in found
    assert "--job other" in found


@pytest.mark.parametrize("service", SERVICES)
def test_an_endpoint_that_nobody_has_thought_of_needs_run(service):
    guard = SERVICES[service]()
    for path in ("/v1/new", "/v1/groups/a/b/c", "/v1/storage", "/", "/v1/info/", "/metrics\n"):
        assert guard._policy.role_of("GET", path) is Role.RUN
    assert guard._policy.role_of("POST", "/v1/groups") is Role.RUN
    assert guard._policy.role_of("DELETE", "/v1/groups/world") is Role.RUN
