"""The application as a whole: health, errors, and the OpenAPI document; test_guarded has the access."""

from __future__ import annotations

import re
from dataclasses import asdict

import httpx
import pytest

from rankmesh_agent.wire.version import __version__

pytestmark = pytest.mark.anyio


def check_problem(response: httpx.Response, status: int, code: str) -> str:
    """Check that the response is this problem; return its detail."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["code"]) == (status, code)
    return body["detail"]


async def test_health(direct, registry, ask):
    registry.join(ask.join(0))
    del direct.headers["Authorization"]
    health = {"status": "ok", "service": "rankmesh-gateway", "id": registry.id, "version": __version__}
    for path, document in {
        "/health": {**health, "jobs": 1, "ranks": 1, "hosted": False},
        "/livez": {"ok": True},
        "/readyz": {"ok": True},
    }.items():
        response = await direct.get(path)
        assert (response.status_code, response.json()) == (200, document)


async def test_problems(direct, registry, ask, monkeypatch):
    typed = await direct.post("/v1/join", json=asdict(ask.join(0)) | {"world_size": "many"})
    assert check_problem(typed, 422, "invalid-request").startswith("body.world_size: expected a number")
    undecodable = await direct.post("/v1/leave", headers={"Content-Type": "application/json"}, content=b'"\xff"')
    check_problem(undecodable, 400, "bad-request")
    beyond = await direct.post("/v1/join", json=asdict(ask.join(5, 2)))
    assert "rank 5 is not in a world of 2" in check_problem(beyond, 422, "invalid-request")
    monkeypatch.setattr(registry, "ranks", lambda job: 1 / 0)
    assert "ZeroDivisionError" in check_problem(await direct.get("/v1/ranks"), 500, "internal-error")


async def test_the_openapi_document(direct):
    document = (await direct.get("/openapi.json")).json()
    assert {(path, *sorted(operations)) for path, operations in document["paths"].items()} == {
        ("/", "get"),
        ("/health", "get"),
        ("/livez", "get"),
        ("/readyz", "get"),
        ("/metrics", "get"),
        ("/v1/join", "post"),
        ("/v1/heartbeat", "post"),
        ("/v1/leave", "post"),
        ("/v1/snapshot", "get"),
        ("/v1/ranks", "get"),
        ("/v1/rates", "get"),
        ("/v1/waiting", "get"),
        ("/v1/ranks/{rank}/snapshot", "get"),
        ("/v1/ranks/snapshots", "get"),
        ("/v1/diagnosis", "get"),
        ("/v1/stragglers", "get"),
        ("/v1/timelines", "get"),
        ("/v1/jobs", "get"),
        ("/v1/groups", "get", "post"),
        ("/v1/groups/{group}", "get"),
        ("/v1/groups/{group}/inflight", "get"),
        ("/v1/groups/{group}/abort", "post"),
        ("/v1/groups/{group}/shrink", "post"),
        ("/v1/groups/{group}/grow", "post"),
        ("/v1/events", "get"),
        ("/v1/overview", "get"),
        ("/v1/dashboard/codes", "post"),
        ("/v1/dashboard/sessions", "delete", "post"),
        ("/v1/agents", "get", "post"),
        ("/v1/agents/leave", "post"),
        ("/v1/leases", "post"),
        ("/v1/launchers", "post"),
        ("/v1/ended", "post"),
        ("/v1/members", "post"),
        ("/dashboard/{name}", "get"),
    }
    summaries = [each["summary"] for path in document["paths"].values() for each in path.values()]
    assert not [each for each in summaries if each.istitle() or "\n" in each]
    join = document["paths"]["/v1/join"]["post"]["responses"]
    assert set(join) == {"200", "400", "401", "403", "408", "409", "410", "413", "421", "422", "429", "431", "503"}
    for status, response in join.items():
        schema = {"schema": {"$ref": f"#/components/schemas/{'JoinReply' if status == '200' else 'Problem'}"}}
        assert response["content"] == {"application/json" if status == "200" else "application/problem+json": schema}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    secured = {path: "security" in next(iter(each.values())) for path, each in document["paths"].items()}
    assert {path for path, wants in secured.items() if not wants} == {
        "/",
        "/dashboard/{name}",
        "/health",
        "/livez",
        "/readyz",
    }
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        (
            {"content": b"{}", "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
            r"POST /v1/groups takes a JSON object, and the body is application/x-www-form-urlencoded: .*curl --json",
        ),
        ({"json": [1]}, "body: must be a JSON object"),
        ({"json": {"ranks": "x"}}, "body.ranks: expected a list, got a string"),
    ],
)
async def test_a_wrong_body_is_described(direct, sent, detail):
    answer = await direct.post("/v1/groups", **sent)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert re.match(detail, answer.json()["detail"])
