"""The agent's OpenAPI document: the statuses of each operation, each of them provoked, and the types that clients use.

``tests/http`` has the rest: that no other status comes (schemathesis), and the checks of every request (test_guarded).
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from support.http_ranks import npy
from support.processes import free_port

from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.groups import GroupExistsError
from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.routes import probe
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import QueuePush, Set
from rankmesh_agent.wire.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    NotLeasedError,
    RankFailedError,
)

pytestmark = pytest.mark.anyio

KEY, GROUP = "/v1/store/{key}", "/v1/groups/{group_id}"
EVERYWHERE = {400, 401, 403, 408, 413, 421, 429, 431}
"""Provoked by tests/http/test_guarded.py, tests/security and test_server.py."""
OPEN = {"/health", "/livez", "/readyz"}
BEHIND_TOKEN = 503
"""Of a server without a descriptor to check the client's user: test_other_users.py."""
LONG = "x" * 8193
UNREADABLE = {"content": b"\xff", "headers": {"Content-Type": "application/json"}}
LISTED = "http://127.0.0.1:1"
"""The URL that the gateway is taken to list; no process listens there."""
X, STACK = npy(np.ones((2, 3), np.float32)), npy(np.ones((4, 3), np.float32))

Requests = dict[int, Any]


def body(good: int, valid: dict[str, Any], invalid: dict[str, Any], **others: Any) -> Requests:
    """An operation with a JSON body."""
    return {good: {"json": valid}, 400: UNREADABLE, 422: {"json": invalid}} | {
        int(status.removeprefix("_")): request for status, request in others.items()
    }


OTHER = {"headers": {"If-Match": '"another"'}}
KEYS = {"keys": ["none"], "timeout": 0}
REQUESTS: dict[tuple[str, str], Requests] = {
    ("get", "/health"): {200: {}, 503: {}},
    ("get", "/livez"): {200: {}},
    ("get", "/readyz"): {200: {}, 503: {}},
    ("get", "/metrics"): {200: {}},
    ("get", "/v1/info"): {200: {}},
    ("get", "/v1/host"): {200: {}},
    ("get", "/v1/stacks"): {200: {}},
    ("get", "/v1/flight-recorder"): {200: {}, 422: {"params": {"last": -1}}},
    ("get", "/v1/probe"): {200: {"params": {"bytes": 10}}, 422: {"params": {"bytes": 1 << 40}}, 503: {}},
    ("post", "/v1/probe"): body(
        200, {"url": LISTED}, {}, _502={"json": {"url": LISTED}}, _503={"json": {"url": LISTED}}
    ),
    ("get", "/v1/groups"): {200: {}},
    ("get", GROUP): {200: {}, 404: {"group": "none"}, 422: {"group": LONG}, 503: {}},
    ("get", f"{GROUP}/inflight"): {200: {}, 404: {"group": "none"}, 422: {"group": LONG}},
    ("delete", GROUP): {204: {}, 404: {"group": "none"}, 409: {}, 422: {"group": LONG}, 503: {}},
    ("post", f"{GROUP}/abort"): {200: {}, 400: UNREADABLE, 404: {"group": "none"}, 422: {"group": LONG}, 503: {}},
    ("post", "/v1/groups"): body(
        201, {"ranks": [0, 1], "name": "two"}, {}, _200={"json": {"ranks": [0, 1], "name": "pair"}}
    )
    | {status: {"json": {"ranks": [0, 1], "name": "two"}} for status in (409, 410, 500, 503, 504)},
    ("get", "/v1/store"): {200: {}, 422: {"params": {"prefix": LONG}}},
    ("post", "/v1/store/add"): body(200, {"key": "number"}, {}, _409={"json": {"key": "text"}}),
    ("post", "/v1/store/append"): {204: {"params": {"key": "text"}, "content": b"1"}, 422: {"content": b"1"}},
    ("post", "/v1/store/check"): body(200, {"keys": ["number"]}, {"keys": [""]}),
    ("post", "/v1/store/compare_set"): body(
        200, {"key": "k", "expected": "", "desired": ""}, {"key": "k", "expected": "no base64", "desired": ""}
    ),
    ("post", "/v1/store/count"): {200: {}, 422: {"params": {"prefix": LONG}}},
    ("post", "/v1/store/multi_get"): body(200, {"keys": ["number"]}, {"keys": "number"}, _408={"json": KEYS}),
    ("post", "/v1/store/multi_set"): body(204, {"values": {"n": "MQ=="}}, {"values": {"n": "no base64"}}),
    ("post", "/v1/store/queue_len"): body(200, {"key": "queue"}, {"key": ""}),
    ("post", "/v1/store/queue_pop"): body(200, {"key": "queue"}, {}, _404={"json": {"key": "none"}}),
    ("post", "/v1/store/queue_push"): {204: {"params": {"key": "queue"}, "content": b"1"}, 422: {"content": b"1"}},
    ("post", "/v1/store/wait"): body(200, {"keys": ["number"]}, {"keys": "number"}, _408={"json": KEYS}),
    ("get", KEY): {
        200: {},
        304: {"headers": {"If-None-Match": "*"}},
        404: {"key": "none"},
        412: OTHER,
        422: {"key": ""},
    },
    ("put", KEY): {204: {"content": b"1"}, 412: {"headers": {"If-None-Match": "*"}}, 422: {"key": ""}},
    ("delete", KEY): {204: {}, 404: {"key": "none"}, 412: OTHER, 422: {"key": ""}},
}
"""A request for each status of each operation; ``key`` and ``group`` go into the path."""
for (_, path), requests in REQUESTS.items():
    if path.startswith("/v1/store"):
        requests[502] = next(iter(requests.values()))

ERRORS = {
    409: CollectiveMismatchError("the ranks did not make the same call", ranks=[2]),
    410: GroupAbortedError("another member aborted the group"),
    503: RankFailedError("rank 2 died", ranks=[2]),
    504: CollectiveTimeoutError("waited for rank 2", ranks=[2]),
    500: RuntimeError("a bug's internals"),
}

CALLS: dict[str, tuple[Requests, set[str]]] = {
    "all_reduce": ({200: (X, {"op": "avg"})}, {"op", "factor"}),
    "reduce": ({200: (X, {"dst": 1}), 204: (X, {"dst": 0})}, {"dst", "op", "factor"}),
    "broadcast": ({200: (X, {"src": 0}), 204: (X, {"src": 1})}, {"src"}),
    "all_gather": ({200: (X, {})}, set()),
    "gather": ({200: (X, {"dst": 1}), 204: (X, {"dst": 0})}, {"dst"}),
    "scatter": ({200: (X, {})}, {"src"}),
    "reduce_scatter": ({200: (STACK, {})}, {"op", "factor"}),
    "all_to_all": ({200: (STACK, {})}, set()),
    "barrier": ({204: (b"", {})}, set()),
    "send": ({204: (X, {"dst": 0})}, {"dst", "tag"}),
    "recv": ({200: (X, {})}, {"src", "tag"}),
}
"""For each call, the array and query of each status without an error, and the parameters of its own."""
for call, (good, _) in CALLS.items():
    requests = {status: {"content": array, "params": query} for status, (array, query) in good.items()}
    usual = next(iter(requests.values()))
    requests |= {404: {"group": "none"}, 422: {"group": LONG}}
    requests |= dict.fromkeys(ERRORS, usual)
    if call != "barrier":
        requests[400] = usual | {"content": b"\xff", "headers": {"Content-Type": "application/octet-stream"}}
        requests[415] = usual | {"headers": {"Content-Type": "text/plain"}}
    REQUESTS["post", f"{GROUP}/{call}"] = requests

CASES = [
    (method, path, status)
    for (method, path), requests in REQUESTS.items()
    for status in sorted(requests)
    if path.rpartition("/")[2] not in {*CALLS} - {"all_reduce", "barrier", "recv"} or status not in (404, *ERRORS)
]
"""Some calls stand for all where the call does not matter."""


@pytest.fixture(scope="module")
def document():
    async def fetch():
        transport = httpx.ASGITransport(create_app(None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/openapi.json")).json()

    return asyncio.run(fetch())


@pytest.fixture(scope="module")
def operations(document) -> dict[tuple[str, str], Any]:
    return {(method, path): each for path, methods in document["paths"].items() for method, each in methods.items()}


def test_the_statuses_of_each_operation(operations):
    found = {operation: {int(status) for status in each["responses"]} for operation, each in operations.items()}
    assert found == {
        (method, path): EVERYWHERE | set(requests) | (set() if path in OPEN else {BEHIND_TOKEN})
        for (method, path), requests in REQUESTS.items()
    }
    assert len({each["operationId"] for each in operations.values()}) == len(operations)


@pytest.mark.parametrize(("method", "path", "status"), CASES)
async def test_every_documented_response_is_real(client, agent, document, method, path, status, monkeypatch):
    monkeypatch.setattr("rankmesh_agent.diagnostics.probe._LISTED_SECONDS", -1.0)  # forget an earlier test's list
    for command in (Set("number", b"1"), Set("text", b"text"), QueuePush("queue", b"1")):
        await agent.store.submit(command)
    content = dict(REQUESTS[method, path][status])
    key = content.pop("key", "text" if status in (304, 412) else "number")
    target = path.replace("{group_id}", content.pop("group", "world")).replace("{key}", key)
    is_call = path.rpartition("/")[2] in CALLS
    if status != 502:
        monkeypatch.setattr(Prober, "_list_agents", lambda self: iter([LISTED]))
    elif path.startswith("/v1/store"):
        agent.store.close()
        agent.store = StoreClient(f"http://127.0.0.1:{free_port()}")
    if status == 503 and path == "/v1/probe":
        monkeypatch.setattr(probe, "MAX_CONCURRENT_PROBES", -1)
    elif status == 503 and path in OPEN:
        agent.is_ready, agent.reasons = False, ["group 'pair': rank 3 failed"]
    elif status == 503 and not is_call:
        agent.error = NotLeasedError("the agent is free")
    elif status == 409 and path in ("/v1/groups", GROUP):
        agent.error = GroupExistsError("there is one")
    elif status in ERRORS and (is_call or path == "/v1/groups"):
        agent.error = ERRORS[status]
    answer = await client.request(method, target, **content)
    assert answer.status_code == status, answer.text
    assert "internals" not in answer.text
    documented = document["paths"][path][method]["responses"][str(status)].get("content", {"": None})
    media_type = answer.headers.get("content-type", "")
    assert {media_type, media_type.partition(";")[0]} & set(documented)
    if status >= 400 and (path, status) != ("/health", 503):
        assert documented == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
        assert set(document["components"]["schemas"]["Problem"]["required"]) <= set(answer.json())
        assert answer.json()["status"] == status


async def test_summaries_are_sentences(operations):
    found = {operation: each["summary"] for operation, each in operations.items()}
    assert found["post", "/v1/store/add"] == "Add to a number, and return the sum"
    assert not [each for each in found.values() if each.istitle() or "\n" in each]


async def test_answers_have_schemas(document, operations):
    found = {
        operation: each["responses"]["200"]["content"]["application/json"]["schema"]
        for operation, each in operations.items()
        if "application/json" in each["responses"].get("200", {}).get("content", {})
        and "application/x-npy" not in each["responses"]["200"]["content"]
    }
    lists = {("get", path) for path in ("/v1/groups", f"{GROUP}/inflight", "/v1/flight-recorder", "/v1/stacks")}
    assert len(found) == 20
    assert {operation for operation, schema in found.items() if "$ref" not in schema} == lists | {("get", "/v1/store")}
    assert all(found[operation]["items"]["$ref"] for operation in lists)
    assert found["get", "/v1/store"]["items"] == {"type": "string"}
    assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_values_are_bytes(operations):
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    for operation in (
        ("get", "/v1/probe"),
        ("get", KEY),
        ("post", "/v1/store/compare_set"),
        ("post", "/v1/store/queue_pop"),
    ):
        assert operations[operation]["responses"]["200"]["content"] == octets
    for operation in (("put", KEY), ("post", "/v1/store/append"), ("post", "/v1/store/queue_push")):
        assert operations[operation]["requestBody"]["content"] == octets


@pytest.mark.parametrize("call", CALLS)
def test_arrays_have_three_forms_and_parameters_the_names_of_torch(operations, call):
    forms = {"application/x-npy", "application/octet-stream", "application/json"}
    operation = operations["post", f"{GROUP}/{call}"]
    assert set(operation.get("requestBody", {}).get("content", {})) == (set() if call == "barrier" else forms)
    given = operation["responses"].get("200")
    if given is not None:
        assert set(given["content"]) == forms
        assert {"RankMesh-Dtype", "RankMesh-Shape"} <= set(given["headers"])
    names = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"}
    described = set() if call == "barrier" else {"dtype", "shape"}
    assert names == CALLS[call][1] | described | {"timeout"}


async def test_every_change_of_the_store_takes_an_idempotency_key(operations):
    named = {
        operation
        for operation, each in operations.items()
        if "Idempotency-Key" in [parameter["name"] for parameter in each.get("parameters", ())]
    }
    reads = {"check", "count", "multi_get", "queue_len", "wait"}
    store = {(method, path) for method, path in REQUESTS if path.startswith("/v1/store") and method != "get"}
    assert named == {(method, path) for method, path in store if path.rpartition("/")[2] not in reads}


async def test_a_slash_at_the_end_is_another_path(client):
    assert (await client.get("/v1/groups/")).status_code == 404


async def test_every_operation_but_health_needs_the_token(document, operations):
    assert {path for (_, path), each in operations.items() if "security" not in each} == OPEN
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
