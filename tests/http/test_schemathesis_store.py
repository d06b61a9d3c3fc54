"""The HTTP face of a store on its own against its OpenAPI document."""

from __future__ import annotations

from typing import Any

import pytest
from support.openapi import FEW, HOST, LONG_POLL_SECONDS, TOKEN, Fresh, put_to_the_test, schema_of

from rankmesh_agent.http.app import create_store_app
from rankmesh_agent.store.memory import MemoryStore

keys = Fresh(MemoryStore)
schema = schema_of(create_store_app(keys, token=TOKEN, names=[HOST]))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh_agent.http.routes.store.LONG_POLL_SECONDS", LONG_POLL_SECONDS)


@schema.parametrize()
@FEW
def test_what_the_document_says_is_so(case: Any) -> None:
    keys.renew()  # or else one request would come under the Idempotency-Key of another
    put_to_the_test(case)
