"""An application's OpenAPI document put to the test by schemathesis: what it says is so, and nothing else happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import allow_header_conformance, positive_data_acceptance
from schemathesis.config import SchemathesisConfig

TOKEN = "secret"
HOST = "testserver"
"""The name by which schemathesis asks an application."""
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
SECONDS = 10.0
"""How long an answer may take; waits inside are much shorter."""
LONG_POLL_SECONDS = 0.01
"""To be set where answers are held back, so that the tests do not take forever."""

FEW = settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""How many requests are made up for an operation, besides those at the edges of its schema; always the same ones."""


def put_to_the_test(case: Any, beyond: Collection[str] = ()) -> None:
    """Send a request that schemathesis made up, and check the answer.

    Args:
        case: the request.
        beyond: paths that may refuse what the document allows: their fields have to fit to each other.
    """
    headers = {name.lower(): value for name, value in (case.headers or {}).items()}
    # It takes a number for any header's text, and does not look whether it matches the pattern.
    misfits = [
        parameter["name"]
        for parameter in case.operation.definition.raw.get("parameters", ())
        if parameter["in"] == "header"
        and not re.search(parameter["schema"].get("pattern", ""), str(headers.get(parameter["name"].lower(), "*")))
    ]
    path = case.operation.path
    excluded = [positive_data_acceptance] if misfits or path in beyond else []
    if path.startswith("/v1/store/") and "{" not in path:
        excluded.append(allow_header_conformance)  # by the other methods, that is a key like any other
    case.call_and_validate(headers=AUTHORIZATION, excluded_checks=excluded)


def schema_of(app: Any) -> Any:
    """Return an application's schema, to be parametrized by."""
    checks = {
        # What a service says of others that it needs, or of itself for the moment, is no mistake: 500 is one.
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 501, 502, 503, 504]},
        # A request may be well-formed and come too early, or with a condition that does not hold.
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "3xx", 401, 403, 404, 408, 409, 410, 412, 429, 502, 503, 504]
        },
    }
    config = SchemathesisConfig.from_dict(
        {
            "request-timeout": SECONDS,
            "max-stream-events": 2,
            "checks": checks,
            # What has no end is looked at for a moment.
            "operations": [{"include-path": "/v1/events", "request-timeout": 0.05}],
            "generation": {"with-security-parameters": False},  # the tests bring the token
        }
    )
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=AUTHORIZATION)


class Fresh:
    """Stands for an object that is made anew for each request.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.renew()

    def renew(self) -> None:
        self._now = self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)
