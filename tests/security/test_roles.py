"""Every endpoint of every service, as its OpenAPI document lists them, under no, a wrong and each role's credential."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.views import FakeAgent

from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.wire.credentials import Credentials, Role
from rankmesh_gateway.http.app import create_app as create_gateway

TOKEN = "secret"
SERVICES: dict[str, Any] = {
    "agent": lambda: create_app(FakeAgent(), token=TOKEN, leasable=True),
    "store": lambda: create_store_app(MemoryStore(), token=TOKEN),
    "gateway": lambda: create_gateway(token=TOKEN),
}
OPEN = {"/health", "/livez", "/readyz", "/", "/dashboard/{name}"}
PART = "icon.svg"
"""A part of the dashboard."""
READ = {
    "agent": "/metrics /v1/info /v1/groups /v1/groups/{group_id} /v1/groups/{group_id}/inflight /v1/flight-recorder "
    "/v1/host /v1/probe",
    "gateway": "/metrics /v1/jobs /v1/ranks /v1/agents /v1/groups /v1/groups/{group} /v1/groups/{group}/inflight "
    "/v1/waiting /v1/snapshot /v1/events /v1/overview",
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
    if service == "agent" and method == "POST" and path.startswith("/v1/groups/{group_id}/"):
        return Role.RUN if path.endswith("/abort") else Role.USE
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
            for held in (None, *Role):
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


@pytest.mark.parametrize("service", SERVICES)
def test_an_endpoint_that_nobody_has_thought_of_needs_run(service):
    guard = SERVICES[service]()
    for path in ("/v1/new", "/v1/groups/a/b/c", "/v1/storage", "/", "/v1/info/", "/metrics\n"):
        assert guard._role_of("GET", path) is Role.RUN
    assert guard._role_of("POST", "/v1/groups") is Role.RUN
    assert guard._role_of("DELETE", "/v1/groups/world") is Role.RUN
