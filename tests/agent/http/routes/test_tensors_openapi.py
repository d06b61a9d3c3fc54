"""What the OpenAPI document says of calls and of groups is so: every status it documents is provoked here."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from support.http_ranks import npy

from rankmesh_agent.groups import GroupExistsError
from rankmesh_agent.http.routes import tensor_io
from rankmesh_agent.wire.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    NotLeasedError,
    RankFailedError,
)

pytestmark = pytest.mark.anyio

GROUP = "/v1/groups/{group_id}"
X, STACK = npy(np.ones((2, 3), np.float32)), npy(np.ones((4, 3), np.float32))
EVERYWHERE = {401, 403, 404, 413, 421, 422, 503}
CALL = {408, 409, 410, 500, 504}
TAKES = {400, 415}
GOOD = {
    "all_reduce": ({200}, X, {"op": "avg"}),
    "reduce": ({200, 204}, X, {"dst": 1}),
    "broadcast": ({200, 204}, X, {"src": 0}),
    "all_gather": ({200}, X, {}),
    "gather": ({200, 204}, X, {"dst": 1}),
    "scatter": ({200}, X, {}),
    "reduce_scatter": ({200}, STACK, {}),
    "all_to_all": ({200}, STACK, {}),
    "barrier": ({204}, b"", {}),
    "send": ({204}, X, {"dst": 0}),
    "recv": ({200}, X, {}),
}
"""The statuses of each call that went well, and what asks for the first."""
OTHER_ROOT = {"reduce": {"dst": 0}, "broadcast": {"src": 1}, "gather": {"dst": 0}}
"""What asks for the second."""
GROUPS = {
    ("post", "/v1/groups"): (EVERYWHERE - {404}) | {200, 201, 400, 409, 410, 500, 504},
    ("delete", GROUP): EVERYWHERE | {204, 409},
    ("post", f"{GROUP}/abort"): EVERYWHERE | {200, 400},
}
ERRORS = {
    409: CollectiveMismatchError("the ranks did not make the same call", ranks=[2]),
    410: GroupAbortedError("another member gave the group up"),
    503: RankFailedError("rank 2 died", ranks=[2]),
    504: CollectiveTimeoutError("waited for rank 2", ranks=[2]),
    500: RuntimeError("a bug"),
}


def expected():
    found = {
        ("post", f"{GROUP}/{call}"): EVERYWHERE | CALL | good | (set() if call == "barrier" else TAKES)
        for call, (good, _, _) in GOOD.items()
    }
    return found | GROUPS


OPERATIONS = set(expected())
CASES = sorted((*operation, status) for operation, statuses in expected().items() for status in statuses)


@pytest.fixture
async def client(agent, shared_app):
    """Asks the application of this module's tests, and gives the token."""
    current, app = shared_app
    current.agent = agent
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as made:
        yield made


@pytest.fixture(scope="module")
def document(shared_app):
    async def ask():
        transport = httpx.ASGITransport(shared_app[1])
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as made:
            return (await made.get("/openapi.json")).json()

    return asyncio.run(ask())


def of_operation(document, method, path):
    return document["paths"][path][method]


def test_it_documents_what_there_is(document):
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "tensors" in operation["tags"] or (method, path) in GROUPS:
                found[method, path] = {int(status) for status in operation["responses"]}
    assert found == expected()


def request_for(method, path, status):
    """Return what provokes a status: the target, and what goes with it."""
    target = path.replace("{group_id}", "world")
    call = path.rpartition("/")[2]
    headers = {}
    if (method, path) == ("post", "/v1/groups"):
        content = {"json": {"ranks": [0, 1], "name": "pair" if status == 200 else "two"}}
    elif call in GOOD:
        _, body, query = GOOD[call]
        if status == 204:
            query = OTHER_ROOT.get(call, query)
        content = {"content": body, "params": query}
    else:
        content = {}
    if status == 400:
        content = {**content, "content": b"\xff", "headers": {"Content-Type": "application/json"}}
        content.pop("json", None)
        if call in GOOD:
            content["headers"] = {"Content-Type": "application/octet-stream"}
    elif status == 404:
        target = target.replace("world", "none")
    elif status == 422:
        target = target.replace("world", "x" * 300)
        if target == "/v1/groups":
            content = {"json": {}}
    elif status == 415:
        headers["Content-Type"] = "text/plain"
    elif status == 403:
        headers["Origin"] = "http://evil.example"
    elif status == 413:
        headers["Content-Length"] = str(1 << 40)
    elif status == 421:
        headers["Host"] = "evil.example"
    content["headers"] = content.get("headers", {}) | headers
    return target, content


@pytest.mark.parametrize(("method", "path", "status"), CASES)
async def test_every_documented_response_is_real(client, agent, document, method, path, status, monkeypatch):
    target, content = request_for(method, path, status)
    call = path.rpartition("/")[2]
    if status == 401:
        del client.headers["Authorization"]
    elif status == 408:
        monkeypatch.setattr(tensor_io, "IDLE_SECONDS", 0.01)

        async def halting():
            yield X[:10]
            await asyncio.sleep(2)

        content["content"] = halting()
    elif status in ERRORS and (status != 503 or call in GOOD):
        agent.error = ERRORS[status]
    elif status == 503:
        agent.error = NotLeasedError("the agent is free")
    if status == 409 and path in ("/v1/groups", GROUP):
        agent.error = GroupExistsError("there is one")
    answer = await client.request(method, target, **content)
    assert answer.status_code == status, answer.text
    documented = of_operation(document, method, path)["responses"][str(status)].get("content", {"": None})
    assert answer.headers.get("content-type", "") in documented
    if documented.get("application/problem+json"):
        assert set(document["components"]["schemas"]["Problem"]["required"]) <= set(answer.json())
        assert answer.json()["status"] == status


@pytest.mark.parametrize("call", GOOD)
def test_arrays_come_and_go_in_two_forms(document, call):
    forms = {"application/x-npy", "application/octet-stream"}
    operation = of_operation(document, "post", f"{GROUP}/{call}")
    assert set(operation.get("requestBody", {}).get("content", {})) == (set() if call == "barrier" else forms)
    given = operation["responses"].get("200")
    if given is not None:
        assert set(given["content"]) == forms
        assert {"RankMesh-Dtype", "RankMesh-Shape"} <= set(given["headers"])


def test_names_of_parameters_are_those_of_torch(document):
    found = {
        call: {
            parameter["name"]
            for parameter in of_operation(document, "post", f"{GROUP}/{call}")["parameters"]
            if parameter["in"] == "query"
        }
        - {"timeout"}
        for call in GOOD
    }
    described = {"dtype", "shape"}
    assert all(described <= names for call, names in found.items() if call != "barrier")
    assert {call: names - described if call != "barrier" else names for call, names in found.items()} == {
        "all_reduce": {"op", "factor"},
        "reduce": {"dst", "op", "factor"},
        "broadcast": {"src"},
        "all_gather": set(),
        "gather": {"dst"},
        "scatter": {"src"},
        "reduce_scatter": {"op", "factor"},
        "all_to_all": set(),
        "barrier": set(),
        "send": {"dst", "tag"},
        "recv": {"src", "tag"},
    }
