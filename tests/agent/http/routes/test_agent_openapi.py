"""What the OpenAPI document says is so: every status it documents is provoked here, and no other is."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support.processes import free_port

from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.routes import probe
from rankmesh_agent.store.commands import QueuePush, Set
from rankmesh_agent.store.http_client import HttpStore
from rankmesh_agent.wire.errors import NotLeasedError

pytestmark = pytest.mark.anyio

ELSEWHERE = {("post", "/v1/groups"), ("delete", "/v1/groups/{group_id}"), ("post", "/v1/groups/{group_id}/abort")}
"""Operations of which test_tensors_openapi says what is so; and so it does of those with the tag 'tensors'."""

JSON = {"Content-Type": "application/json"}
KEY = "/v1/store/{key}"

OPERATIONS = {
    ("get", "/health"),
    ("get", "/livez"),
    ("get", "/readyz"),
    ("get", "/v1/info"),
    ("get", "/v1/groups"),
    ("get", "/v1/groups/{group_id}"),
    ("get", "/v1/groups/{group_id}/inflight"),
    ("get", "/v1/flight-recorder"),
    ("get", "/v1/stacks"),
    ("get", "/metrics"),
    ("get", "/v1/host"),
    ("get", "/v1/probe"),
    ("post", "/v1/probe"),
    ("get", "/v1/store"),
    ("post", "/v1/store/add"),
    ("post", "/v1/store/append"),
    ("post", "/v1/store/check"),
    ("post", "/v1/store/compare_set"),
    ("post", "/v1/store/count"),
    ("post", "/v1/store/multi_get"),
    ("post", "/v1/store/multi_set"),
    ("post", "/v1/store/queue_len"),
    ("post", "/v1/store/queue_pop"),
    ("post", "/v1/store/queue_push"),
    ("post", "/v1/store/wait"),
    ("get", KEY),
    ("put", KEY),
    ("delete", KEY),
}
OPEN = {"/health", "/livez", "/readyz"}
WITHOUT_ANSWER = {"/v1/store/append", "/v1/store/multi_set", "/v1/store/queue_push"}

LISTED = "http://127.0.0.1:1"
"""What the gateway is taken to list: nobody is there."""

GOOD = {
    ("get", "/v1/probe"): ("/v1/probe", {"params": {"bytes": 10}}),
    ("post", "/v1/probe"): ("/v1/probe", {"json": {"url": LISTED}}),
    ("get", "/v1/groups/{group_id}"): ("/v1/groups/00000000000000aa", {}),
    ("get", "/v1/groups/{group_id}/inflight"): ("/v1/groups/00000000000000aa/inflight", {}),
    ("post", "/v1/store/add"): ("/v1/store/add", {"json": {"key": "number"}}),
    ("post", "/v1/store/append"): ("/v1/store/append", {"params": {"key": "text"}, "content": b"1"}),
    ("post", "/v1/store/check"): ("/v1/store/check", {"json": {"keys": ["number"]}}),
    ("post", "/v1/store/compare_set"): ("/v1/store/compare_set", {"json": {"key": "k", "expected": "", "desired": ""}}),
    ("post", "/v1/store/multi_get"): ("/v1/store/multi_get", {"json": {"keys": ["number"]}}),
    ("post", "/v1/store/multi_set"): ("/v1/store/multi_set", {"json": {"values": {"number": "MQ=="}}}),
    ("post", "/v1/store/queue_len"): ("/v1/store/queue_len", {"json": {"key": "queue"}}),
    ("post", "/v1/store/queue_pop"): ("/v1/store/queue_pop", {"json": {"key": "queue"}}),
    ("post", "/v1/store/queue_push"): ("/v1/store/queue_push", {"params": {"key": "queue"}, "content": b"1"}),
    ("post", "/v1/store/wait"): ("/v1/store/wait", {"json": {"keys": ["number"]}}),
    ("get", KEY): ("/v1/store/number", {}),
    ("put", KEY): ("/v1/store/number", {"content": b"1"}),
    ("delete", KEY): ("/v1/store/number", {}),
}
"""What each operation is asked when nothing is wrong; its own path where that says it all."""

SPECIAL = {
    ("get", "/v1/groups/{group_id}", 404): ("/v1/groups/00000000000000cc", {}),
    ("get", "/v1/groups/{group_id}", 422): (f"/v1/groups/{'x' * 300}", {}),
    ("get", "/v1/groups/{group_id}/inflight", 404): ("/v1/groups/another/inflight", {}),
    ("get", "/v1/groups/{group_id}/inflight", 422): (f"/v1/groups/{'n' * 300}/inflight", {}),
    ("get", "/v1/flight-recorder", 422): ("/v1/flight-recorder", {"params": {"last": "-1"}}),
    ("get", "/v1/probe", 422): ("/v1/probe", {"params": {"bytes": 1 << 40}}),
    ("get", "/v1/probe", 503): ("/v1/probe", {}),
    ("post", "/v1/probe", 400): ("/v1/probe", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/probe", 422): ("/v1/probe", {"json": {}}),
    ("post", "/v1/probe", 502): ("/v1/probe", {"json": {"url": LISTED}}),
    ("post", "/v1/probe", 503): ("/v1/probe", {"json": {"url": LISTED}}),
    ("get", "/v1/store", 422): ("/v1/store", {"params": {"prefix": "k" * 2000}}),
    ("post", "/v1/store/add", 400): ("/v1/store/add", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/add", 409): ("/v1/store/add", {"json": {"key": "text"}}),
    ("post", "/v1/store/add", 422): ("/v1/store/add", {"json": {}}),
    ("post", "/v1/store/append", 422): ("/v1/store/append", {"content": b"1"}),
    ("post", "/v1/store/check", 400): ("/v1/store/check", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/check", 422): ("/v1/store/check", {"json": {"keys": [""]}}),
    ("post", "/v1/store/compare_set", 400): ("/v1/store/compare_set", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/compare_set", 422): (
        "/v1/store/compare_set",
        {"json": {"key": "k", "expected": "no base64", "desired": ""}},
    ),
    ("post", "/v1/store/count", 422): ("/v1/store/count", {"params": {"prefix": "k" * 2000}}),
    ("post", "/v1/store/multi_get", 400): ("/v1/store/multi_get", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/multi_get", 408): ("/v1/store/multi_get", {"json": {"keys": ["none"], "timeout": 0}}),
    ("post", "/v1/store/multi_get", 422): ("/v1/store/multi_get", {"json": {"keys": "number"}}),
    ("post", "/v1/store/multi_set", 400): ("/v1/store/multi_set", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/multi_set", 422): ("/v1/store/multi_set", {"json": {"values": {"number": "no base64"}}}),
    ("post", "/v1/store/queue_len", 400): ("/v1/store/queue_len", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/queue_len", 422): ("/v1/store/queue_len", {"json": {"key": ""}}),
    ("post", "/v1/store/queue_pop", 400): ("/v1/store/queue_pop", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/queue_pop", 404): ("/v1/store/queue_pop", {"json": {"key": "none"}}),
    ("post", "/v1/store/queue_pop", 422): ("/v1/store/queue_pop", {"json": {}}),
    ("post", "/v1/store/queue_push", 422): ("/v1/store/queue_push", {"content": b"1"}),
    ("post", "/v1/store/wait", 400): ("/v1/store/wait", {"content": b"\xff", "headers": JSON}),
    ("post", "/v1/store/wait", 408): ("/v1/store/wait", {"json": {"keys": ["none"], "timeout": 0}}),
    ("post", "/v1/store/wait", 422): ("/v1/store/wait", {"json": {"keys": "number"}}),
    ("get", KEY, 304): ("/v1/store/text", {"headers": {"If-None-Match": "*"}}),
    ("get", KEY, 412): ("/v1/store/text", {"headers": {"If-Match": '"another"'}}),
    ("get", KEY, 404): ("/v1/store/none", {}),
    ("get", KEY, 422): ("/v1/store/", {}),
    ("put", KEY, 412): ("/v1/store/text", {"headers": {"If-None-Match": "*"}}),
    ("put", KEY, 422): ("/v1/store/", {}),
    ("delete", KEY, 404): ("/v1/store/none", {}),
    ("delete", KEY, 412): ("/v1/store/text", {"headers": {"If-Match": '"another"'}}),
    ("delete", KEY, 422): ("/v1/store/", {}),
}
"""What has to be asked for the statuses that are an operation's own."""


def expected() -> dict[tuple[str, str], set[int]]:
    found = {}
    for method, path in OPERATIONS:
        good = 204 if method in ("put", "delete") or path in WITHOUT_ANSWER else 200
        own = {status for *operation, status in SPECIAL if tuple(operation) == (method, path)}
        found[method, path] = {good, 403, 413, 421} | own
        if path not in OPEN:
            found[method, path].add(401)
        if path in ("/health", "/readyz", "/v1/groups/{group_id}"):
            found[method, path].add(503)
        if path.startswith("/v1/store"):
            found[method, path].add(502)
    return found


CASES = sorted((*operation, status) for operation, statuses in expected().items() for status in statuses)


@pytest.fixture(scope="module")
def document():
    async def ask():
        transport = httpx.ASGITransport(create_app(None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/openapi.json")).json()

    document = asyncio.run(ask())
    for path, operations in list(document["paths"].items()):
        for method, operation in list(operations.items()):
            if (method, path) in ELSEWHERE or "tensors" in operation["tags"]:
                del operations[method]
    return document


def responses(document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for status, response in operation["responses"].items():
                yield method, path, int(status), response


async def test_it_documents_what_there_is(document):
    found = {}
    for method, path, status, _ in responses(document):
        found.setdefault((method, path), set()).add(status)
    assert found == expected()


def busy() -> probe._ProbeSlots:
    places = probe._ProbeSlots()
    for _ in range(probe.MAX_CONCURRENT_PROBES):
        places.acquire()
    return places


@pytest.mark.parametrize(("method", "path", "status"), CASES)
async def test_every_documented_response_is_real(client, agent, document, method, path, status, monkeypatch):
    monkeypatch.setattr("rankmesh_agent.diagnostics.probe._LISTED_SECONDS", -1.0)  # whom an earlier test listed
    if status != 502:
        monkeypatch.setattr(Prober, "_ask", lambda self: iter([LISTED]))
    if path == "/v1/probe" and status == 503:
        monkeypatch.setattr(probe, "_outgoing", busy())
        monkeypatch.setattr(probe, "_incoming", busy())
    for command in (Set("number", b"1"), Set("text", b"text"), QueuePush("queue", b"1")):
        await agent.store.execute(command)
    target, content = SPECIAL.get((method, path, status)) or GOOD.get((method, path), (path, {}))
    headers = dict(content.get("headers", {}))
    if status == 401:
        del client.headers["Authorization"]
    elif status == 403:
        headers["Origin"] = "http://evil.example"
    elif status == 413:
        headers["Content-Length"] = str(1 << 40)
    elif status == 421:
        headers["Host"] = "evil.example"
    elif status == 502:
        agent.store = HttpStore(f"http://127.0.0.1:{free_port()}")
    elif status == 503 and path == "/v1/groups/{group_id}":
        agent.error = NotLeasedError("the agent is free")
    elif status == 503:
        agent.is_ready, agent.reasons = False, ["group 'pair': rank 3 failed"]
    answer = await client.request(method, target, **content | {"headers": headers})
    await agent.store.close()
    assert answer.status_code == status
    documented = document["paths"][path][method]["responses"][str(status)].get("content", {"": None})
    assert answer.headers.get("content-type", "").partition(";")[0] in list(documented)
    if documented.get("application/problem+json"):
        assert set(document["components"]["schemas"]["Problem"]["required"]) <= set(answer.json())
        assert answer.json()["status"] == status


async def test_errors_are_problems(document):
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for method, path, status, response in responses(document):
        if status >= 400 and (method, path, status) != ("get", "/health", 503):
            assert response["content"] == problem
    assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_answers_have_schemas(document):
    found = {
        (method, path): response["content"]["application/json"]["schema"]
        for method, path, status, response in responses(document)
        if "application/json" in response.get("content", {}) and status == 200
    }
    schemas = {operation: schema.get("$ref", "").rpartition("/")[2] for operation, schema in found.items()}
    assert schemas == {
        ("get", "/health"): "AgentHealth",
        ("get", "/livez"): "Done",
        ("get", "/readyz"): "Done",
        ("get", "/v1/info"): "AgentInfo",
        ("get", "/v1/groups"): "",
        ("get", "/v1/groups/{group_id}"): "GroupInfo",
        ("get", "/v1/groups/{group_id}/inflight"): "",
        ("get", "/v1/flight-recorder"): "",
        ("get", "/v1/stacks"): "",
        ("get", "/v1/host"): "HostReport",
        ("post", "/v1/probe"): "ProbeReply",
        ("get", "/v1/store"): "",
        ("post", "/v1/store/add"): "StoreNumber",
        ("post", "/v1/store/check"): "StoreFound",
        ("post", "/v1/store/count"): "StoreNumber",
        ("post", "/v1/store/multi_get"): "StoreValues",
        ("post", "/v1/store/queue_len"): "StoreNumber",
        ("post", "/v1/store/wait"): "Done",
    }
    assert found["get", "/v1/groups"]["items"] == {"$ref": "#/components/schemas/GroupInfo"}
    assert found["get", "/v1/store"]["items"] == {"type": "string"}


async def test_values_are_bytes(document):
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    for method, path in (
        ("get", "/v1/probe"),
        ("get", KEY),
        ("post", "/v1/store/compare_set"),
        ("post", "/v1/store/queue_pop"),
    ):
        assert document["paths"][path][method]["responses"]["200"]["content"] == octets
    for method, path in (("put", KEY), ("post", "/v1/store/append"), ("post", "/v1/store/queue_push")):
        assert document["paths"][path][method]["requestBody"]["content"] == octets


async def test_whatever_changes_something_may_be_repeated_safely(document):
    """Each takes an Idempotency-Key."""
    named = {
        (method, path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "Idempotency-Key" in [parameter["name"] for parameter in operation.get("parameters", ())]
    }
    reads = {"check", "count", "multi_get", "queue_len", "wait"}
    store = {(method, path) for method, path in OPERATIONS if path.startswith("/v1/store") and method != "get"}
    assert named == {(method, path) for method, path in store if path.rpartition("/")[2] not in reads}


async def test_everything_but_health_wants_the_token(document):
    wants = {
        (method, path): operation.get("security")
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert {path for (_, path), security in wants.items() if security is None} == OPEN
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


async def test_names_of_operations(document):
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(OPERATIONS)
