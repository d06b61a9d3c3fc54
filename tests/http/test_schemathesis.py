"""Every service against its OpenAPI document: schemathesis generates requests, and checks the responses.

A store and a gateway of no job answer in process; the services of a job, over HTTP, its servers included.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.transport.serialization import Binary
from support.leased import AUTHORIZED, GROUP_SECONDS, LeasedJob
from support.served_store import ServedStore

from rankmesh_agent.http.app import create_store_app
from rankmesh_gateway.http.app import create_app as create_gateway
from rankmesh_gateway.http.routes import events
from rankmesh_gateway.http.routes.events import stream

TOKEN = AUTHORIZED["Authorization"].removeprefix("Bearer ")
BEYOND = {
    *("/v1/join", "/v1/heartbeat", "/v1/agents", "/v1/leases", "/v1/groups", "/v1/launchers", "/v1/lease"),
    *(f"/v1/groups/{{group_id}}/{call}" for call in ("all_reduce", "broadcast", "barrier", "send", "recv")),
    *(f"/v1/groups/{{group}}/{change}" for change in ("shrink", "grow")),
}
"""Paths that may reject what the document allows: their fields have to fit to each other."""

LEFT_OUT = {
    "agent": "/(reduce|all_gather|gather|scatter|reduce_scatter|all_to_all)$"  # parameters like the other calls'
    "|^/v1/store/(count|check|compare_set|append|multi_|queue_)",
    "gateway": "^/v1/(join|heartbeat|leave|launchers|agents/leave)$|^/(livez|readyz|dashboard/.*)?$",
}
"""Paths that the services of a job share with those of none."""
NOT_OF_GROUPS = "^/v1/(?!groups|lease$)|^/(?!v1)|/(broadcast|send)$"
"""Those that depend on no groups, or are like others."""

FEW = settings(
    max_examples=int(os.environ.get("RANKMESH_HTTP_EXAMPLES", "1")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""Requests of an operation besides those at the edges of its schema; always the same ones."""

CONFIG = {
    "request-timeout": 30.0,  # waits inside are much shorter
    "max-stream-events": 2,
    "checks": {
        # What a service reports of another, or of itself for the moment, is no fault: 500 is one.
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 501, 502, 503, 504]},
        # A request may be well-formed and come too early, or with a condition that does not hold.
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "3xx", 401, 403, 404, 408, 409, 410, 412, 429, 502, 503, 504]
        },
    },
    "generation": {"with-security-parameters": False},  # the tests bring the token
}

CONTAINERS = {
    "path_parameters": ParameterLocation.PATH,
    "query": ParameterLocation.QUERY,
    "body": ParameterLocation.BODY,
}
Prepare = Callable[[Any], None]
FUZZ = pytest.mark.skipif("RANKMESH_HTTP_EXAMPLES" not in os.environ, reason="a minute of requests: make test-fuzz")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh_agent.http.routes.store.LONG_POLL_SECONDS", 0.01)
    monkeypatch.setattr("rankmesh_gateway.http.handlers.LONG_POLL_SECONDS", 0.01)
    monkeypatch.setattr(events, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(events, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(events, "stream", first_pieces)


async def first_pieces(*arguments: Any) -> AsyncGenerator[bytes]:
    """Yield the beginning of a stream, which has no end."""
    number = 0
    async with contextlib.aclosing(stream(*arguments)) as pieces:
        async for piece in pieces:
            yield piece
            number += 1
            if number == 4:
                return


@FUZZ
@pytest.mark.parametrize("service", ["store", "gateway"])
def test_a_service_without_a_job(service: str, subtests: pytest.Subtests) -> None:
    names = ["testserver"]  # by which schemathesis calls an application
    if service == "store":
        app = create_store_app(ServedStore(), token=TOKEN, names=names)
    else:
        app = create_gateway(token=TOKEN, names=names)
    send_all(app, subtests, lambda case: None)


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=FUZZ)],
    ids=["groups", "no groups"],
)
def job(request: pytest.FixtureRequest) -> Iterator[LeasedJob]:
    with LeasedJob(groups=request.param) as job:
        yield job


@pytest.mark.parametrize("service", ["agent", "gateway"])
def test_a_service_of_a_job(service: str, job: LeasedJob, subtests: pytest.Subtests) -> None:
    chosen = itertools.cycle([*range(len(job.groups)), "world", None])

    def prepare(case: Any) -> None:
        """Have some requests name the job and one of its groups, and send arrays; none waits for long."""
        job.restore()
        path, query, body = (
            {} if (fields := getattr(case, name)) is None or case.meta.is_negative_at(location) else fields
            for name, location in CONTAINERS.items()
        )
        group = next(chosen)
        if case.path.startswith("/v1/groups/{group_id}/") and not case.meta.is_negative_at(ParameterLocation.QUERY):
            query = case.query = {**query, "timeout": GROUP_SECONDS}
            if group == 0 and not case.meta.generation.mode.is_negative and case.path.endswith(("_reduce", "cast")):
                # In the first group, of rank 0 alone, a call whose arguments fit to each other completes.
                roots = {"src": 0} if case.path.endswith("cast") else {}
                case.query = {"timeout": GROUP_SECONDS, "dtype": "float64", "shape": "2", **roots}
                case.headers, case.media_type, case.body = {}, "application/octet-stream", Binary(bytes(16))
        elif case.path.startswith("/v1/groups") and isinstance(body, dict) and body:
            body["timeout"] = GROUP_SECONDS
        if "bytes" in query:
            query["bytes"] = min(int(query["bytes"]), 1000)
        ends_job = group == "world" and (case.method == "DELETE" or case.path.endswith("/abort"))
        if group is None or ends_job:
            return
        for parameter in {"group", "group_id"} & path.keys():
            path[parameter] = group if group == "world" else job.groups[group]
        if "job" in query:
            query["job"] = job.name
        if case.path in ("/v1/groups", "/v1/ended", "/v1/members") and isinstance(body, dict) and "job" in body:
            body["job"] = job.name

    url = job.url if service == "gateway" else job.agents[0].urls[0]
    send_all(url, subtests, prepare, LEFT_OUT[service] + ("" if job.groups else "|" + NOT_OF_GROUPS))


def send_all(service: Any, subtests: pytest.Subtests, prepare: Prepare, left_out: str = "^$") -> None:
    """Send requests to all paths of an application or URL but some, after their ``prepare``; check the responses."""
    # Not by the plugin for pytest: it generates all requests whenever tests are collected, in each worker.
    import requests
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.pytest.lazy import get_all_tests

    session = requests.Session() if isinstance(service, str) else None

    def check(case: Any) -> None:
        prepare(case)
        case.call_and_validate(session=session, headers=AUTHORIZED, excluded_checks=excluded_checks(case))

    config = SchemathesisConfig.from_dict(CONFIG)
    if session is not None:
        session.trust_env = False  # it would look for proxies for each request
        schema = schemathesis.openapi.from_url(f"{service}/openapi.json", config=config, headers=AUTHORIZED)
    else:
        schema = schemathesis.openapi.from_asgi("/openapi.json", service, config=config, headers=AUTHORIZED)
    schema = schema.exclude(path_regex=left_out)
    for result in get_all_tests(schema=schema, test_func=check, settings=FEW, given_kwargs=None):
        operation, test = result.ok()
        with subtests.test(operation.label):
            test()


def excluded_checks(case: Any) -> list[Any]:
    from schemathesis.checks import allow_header_conformance, positive_data_acceptance, response_schema_conformance

    headers = {name.lower(): value for name, value in (case.headers or {}).items()}
    # It takes a number for any header's text, and does not look whether it matches the pattern.
    misfits = [
        parameter["name"]
        for parameter in case.operation.definition.raw.get("parameters", ())
        if parameter["in"] == "header"
        and not re.search(parameter["schema"].get("pattern", ""), str(headers.get(parameter["name"].lower(), "*")))
    ]
    path = case.operation.path
    # An Idempotency-Key may be that of an earlier request.
    excluded = [positive_data_acceptance] if misfits or path in BEYOND or "idempotency-key" in headers else []
    if path == "/v1/store/{key}":
        excluded.append(response_schema_conformance)  # it takes octets that look like a number for one
    if path.startswith("/v1/store/") and "{" not in path:
        excluded.append(allow_header_conformance)  # by the other methods, that is a key like any other
    return excluded
