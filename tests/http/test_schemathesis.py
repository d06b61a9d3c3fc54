"""Every service against its OpenAPI document: schemathesis generates requests, and checks the responses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.views import FakeAgent

from rankmesh_agent.http.app import create_app, create_store_app
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_gateway.http.app import create_app as create_gateway

HEADERS = {"Authorization": "Bearer secret"}
BEYOND = {
    *("/v1/join", "/v1/heartbeat", "/v1/agents", "/v1/leases", "/v1/groups"),
    *(f"/v1/groups/{{group_id}}/{call}" for call in ("all_reduce", "broadcast", "barrier", "send", "recv")),
}
"""Paths that may reject what the document allows: their fields have to fit to each other."""

LEFT_OUT = {
    "agent": "/(reduce|all_gather|gather|scatter|reduce_scatter|all_to_all)$",  # parameters like the other calls'
    "store": "^/v1/store",  # the agent has the same endpoints
    "gateway": "^$",
}
"""Paths that are left out."""

FEW = settings(max_examples=1, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
"""Requests of an operation besides those at the edges of its schema; always the same ones."""

CONFIG = {
    "request-timeout": 10.0,  # waits inside are much shorter
    "max-stream-events": 2,
    "checks": {
        # What a service reports of another, or of itself for the moment, is no fault: 500 is one.
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 501, 502, 503, 504]},
        # A request may be well-formed and come too early, or with a condition that does not hold.
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "3xx", 401, 403, 404, 408, 409, 410, 412, 429, 502, 503, 504]
        },
    },
    "operations": [{"include-path": "/v1/events", "request-timeout": 0.05}],  # an endless stream
    "generation": {"with-security-parameters": False},  # the tests bring the token
}


@pytest.mark.parametrize("service", LEFT_OUT)
def test_the_document_is_true(service: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by the plugin for pytest: it generates all requests whenever tests are collected, in each worker.
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.pytest.lazy import get_all_tests

    monkeypatch.setattr("rankmesh_agent.http.routes.store.LONG_POLL_SECONDS", 0.01)
    monkeypatch.setattr("rankmesh_gateway.http.handlers.LONG_POLL_SECONDS", 0.01)
    agent = FakeAgent()
    names = ["testserver"]  # by which schemathesis calls an application
    app = {
        "agent": lambda: create_app(agent, token="secret", names=names),
        "store": lambda: create_store_app(MemoryStore(), token="secret", names=names),
        "gateway": lambda: create_gateway(token="secret", names=names),
    }[service]()

    def check(case: Any) -> None:
        agent.store = MemoryStore()  # or else one request would come under the Idempotency-Key of another
        case.call_and_validate(headers=HEADERS, excluded_checks=excluded_checks(case))

    config = SchemathesisConfig.from_dict(CONFIG)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=HEADERS)
    schema = schema.exclude(path_regex=LEFT_OUT[service])
    for result in get_all_tests(schema=schema, test_func=check, settings=FEW, given_kwargs=None):
        operation, test = result.ok()
        with subtests.test(operation.label):
            test()


def excluded_checks(case: Any) -> list[Any]:
    from schemathesis.checks import allow_header_conformance, positive_data_acceptance

    headers = {name.lower(): value for name, value in (case.headers or {}).items()}
    # It takes a number for any header's text, and does not look whether it matches the pattern.
    misfits = [
        parameter["name"]
        for parameter in case.operation.definition.raw.get("parameters", ())
        if parameter["in"] == "header"
        and not re.search(parameter["schema"].get("pattern", ""), str(headers.get(parameter["name"].lower(), "*")))
    ]
    path = case.operation.path
    excluded = [positive_data_acceptance] if misfits or path in BEYOND else []
    if path.startswith("/v1/store/") and "{" not in path:
        excluded.append(allow_header_conformance)  # by the other methods, that is a key like any other
    return excluded
