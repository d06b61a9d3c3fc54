"""The agent's HTTP face against its OpenAPI document."""

from __future__ import annotations

from typing import Any

import pytest
from support.openapi import FEW, HOST, LONG_POLL_SECONDS, TOKEN, put_to_the_test, schema_of
from support.views import FakeAgent

from rankmesh_agent.http.app import create_app
from rankmesh_agent.store.memory import MemoryStore

_CALLS = "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier send recv"
BEYOND = {"/v1/groups", *(f"/v1/groups/{{group_id}}/{call}" for call in _CALLS.split())}
agent = FakeAgent()
schema = schema_of(create_app(agent, token=TOKEN, names=[HOST]))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh_agent.http.routes.store.LONG_POLL_SECONDS", LONG_POLL_SECONDS)


@schema.parametrize()
@FEW
def test_what_the_document_says_is_so(case: Any) -> None:
    agent.store = MemoryStore()  # or else one request would come under the Idempotency-Key of another
    put_to_the_test(case, BEYOND)
