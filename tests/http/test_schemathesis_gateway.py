"""The gateway's HTTP face against its OpenAPI document, whether its front answers or the web application behind it."""

from __future__ import annotations

from typing import Any

import pytest
from support.openapi import FEW, HOST, LONG_POLL_SECONDS, TOKEN, put_to_the_test, schema_of

from rankmesh_gateway.http.app import create_app

BEYOND = {"/v1/join", "/v1/heartbeat", "/v1/agents", "/v1/leases", "/v1/groups"}
schema = schema_of(create_app(token=TOKEN, names=[HOST]))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh_gateway.http.handlers.LONG_POLL_SECONDS", LONG_POLL_SECONDS)


@schema.parametrize()
@FEW
def test_what_the_document_says_is_so(case: Any) -> None:
    put_to_the_test(case, BEYOND)
