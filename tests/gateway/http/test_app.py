"""The application as a whole: what errors look like, and the OpenAPI document; test_guarded has the access."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict

import httpx
import pytest

from rankmesh_gateway.http.app import create_app

pytestmark = pytest.mark.anyio

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
async def client(registry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(registry, token="secret", names=["gateway"]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        yield client


def check_problem(answer: httpx.Response, status: int, code: str) -> str:
    """Check that the answer is this problem; return its detail."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["status"], body["code"]) == (status, code)
    return body["detail"]


class TestProblems:
    async def test_wrong_types_name_the_field(self, client, ask):
        body = asdict(ask.join(0)) | {"world_size": "many"}
        detail = check_problem(await client.post("/v1/join", headers=TOKEN, json=body), 422, "invalid-request")
        assert detail.startswith("body.world_size: ")

    async def test_not_even_text(self, client):
        headers = TOKEN | {"Content-Type": "application/json"}
        check_problem(await client.post("/v1/leave", headers=headers, content=b'"\xff"'), 400, "bad-request")

    async def test_values_that_make_no_sense(self, client, ask):
        answer = await client.post("/v1/join", headers=TOKEN, json=asdict(ask.join(5, 2)))
        assert "rank 5 is not in a world of 2" in check_problem(answer, 422, "invalid-request")

    async def test_a_bug(self, client, registry, monkeypatch):
        monkeypatch.setattr(registry, "ranks", lambda job: 1 / 0)
        answer = await client.get("/v1/ranks", headers=TOKEN)
        assert "ZeroDivisionError" in check_problem(answer, 500, "internal-error")


class TestOpenapi:
    @pytest.fixture
    async def document(self, client):
        return (await client.get("/openapi.json", headers=TOKEN)).json()

    async def test_it_lists_what_is_there(self, document):
        assert {(path, *operations) for path, operations in document["paths"].items()} == {
            ("/", "get"),
            ("/health", "get"),
            ("/livez", "get"),
            ("/readyz", "get"),
            ("/metrics", "get"),
            ("/v1/join", "post"),
            ("/v1/heartbeat", "post"),
            ("/v1/leave", "post"),
            ("/v1/ranks", "get"),
            ("/v1/jobs", "get"),
            ("/v1/groups", "get", "post"),
            ("/v1/groups/{group}", "get"),
            ("/v1/groups/{group}/inflight", "get"),
            ("/v1/groups/{group}/abort", "post"),
            ("/v1/groups/{group}/shrink", "post"),
            ("/v1/groups/{group}/grow", "post"),
            ("/v1/events", "get"),
            ("/v1/overview", "get"),
            ("/v1/agents", "get", "post"),
            ("/v1/agents/leave", "post"),
            ("/v1/leases", "post"),
        }

    async def test_answers_and_errors_have_schemas(self, document):
        join = document["paths"]["/v1/join"]["post"]["responses"]
        assert join["200"]["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/JoinReply"}}}
        assert set(join) == {"200", "400", "401", "403", "409", "413", "421", "422", "503"}
        for status in set(join) - {"200"}:
            assert join[status]["content"] == {
                "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
            }
        assert "HTTPValidationError" not in document["components"]["schemas"]

    async def test_everything_but_health_and_the_page_wants_the_token(self, document):
        secured = {path: "security" in next(iter(each.values())) for path, each in document["paths"].items()}
        assert {path for path, wants in secured.items() if not wants} == {"/", "/health", "/livez", "/readyz"}
        assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
