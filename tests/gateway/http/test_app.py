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


PATHS = {
    "get": "/ /health /livez /readyz /metrics /v1/snapshot /v1/ranks /v1/rates /v1/waiting /v1/ranks/{rank}/snapshot "
    "/v1/ranks/snapshots /v1/diagnosis /v1/stragglers /v1/timelines /v1/jobs /v1/groups /v1/groups/{group} "
    "/v1/groups/{group}/inflight /v1/events /v1/overview /v1/agents /dashboard/{name}",
    "post": "/v1/join /v1/heartbeat /v1/leave /v1/groups /v1/groups/{group}/abort /v1/groups/{group}/shrink "
    "/v1/groups/{group}/grow /v1/dashboard/codes /v1/dashboard/sessions /v1/agents /v1/agents/leave /v1/leases "
    "/v1/launchers /v1/ended /v1/members",
    "delete": "/v1/dashboard/sessions",
}


async def test_the_openapi_document(direct):
    document = (await direct.get("/openapi.json")).json()
    found = {(method, path) for path, operations in document["paths"].items() for method in operations}
    assert found == {(method, path) for method, paths in PATHS.items() for path in paths.split()}
    summaries = [each["summary"] for path in document["paths"].values() for each in path.values()]
    assert not [each for each in summaries if each.istitle() or "\n" in each]
    join = document["paths"]["/v1/join"]["post"]["responses"]
    assert set(join) == {"200", "400", "401", "403", "408", "409", "410", "413", "421", "422", "429", "431", "503"}
    for status, response in join.items():
        schema = {"schema": {"$ref": f"#/components/schemas/{'JoinReply' if status == '200' else 'Problem'}"}}
        assert response["content"] == {"application/json" if status == "200" else "application/problem+json": schema}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    secured = {path: "security" in next(iter(each.values())) for path, each in document["paths"].items()}
    is_open = {path for path, wants in secured.items() if not wants}
    assert is_open == {"/", "/dashboard/{name}", "/health", "/livez", "/readyz"}
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
