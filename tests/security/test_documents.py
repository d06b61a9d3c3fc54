"""Documents that other processes write, read by agents and ranks: whatever they hold, no other error comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh._rendezvous.hosted import GatewayAddress
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.net.http_client import HttpResponse
from rankmesh_agent.remote.codec import error_from
from rankmesh_agent.wire import goodbye
from rankmesh_agent.wire.errors import DistError, DistNetworkError, from_code
from rankmesh_agent.wire.schemas import HeartbeatReply

HOSTILE = {
    "deep": b'{"url": ' + b"[" * 100_000,
    "not UTF-8": b'{"url": "\xff"}',
    "10**5000": b'{"url": 1' + b"0" * 5000 + b"}",
    "NaN": b'{"url": NaN}',
    "list": b'{"url": []}',
    "number": b'{"url": 7}',
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def text(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.param
    return found


def test_rendezvous_files(text: bytes) -> None:
    assert GatewayAddress.from_json(text) is None


@pytest.mark.parametrize("status", [200, 400])
def test_answers_of_a_gateway(text: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    client = GatewayClient(lambda: "http://gateway", "")
    client.locate()
    monkeypatch.setattr(client, "request", lambda *_, **__: HttpResponse(status, text))
    with pytest.raises(DistNetworkError, match="http://gateway is not a RankMesh gateway"):
        client.read(HeartbeatReply, "heartbeat", {})


def test_goodbyes(text: bytes) -> None:
    assert goodbye.decode(text).reason == "its goodbye cannot be read"


@pytest.mark.parametrize(
    "details", [{"ranks": 7}, {"ranks": ["x"]}, {"ranks": {"1": 2}}, {"seq": "x"}, {"op": 5}, {"group": [[]]}]
)
def test_details_of_errors(details: dict[str, Any]) -> None:
    assert from_code("rank-failed", "it failed", **details).details() == {}
    error = error_from({"code": "rank-failed", "message": "it failed", **details})
    assert isinstance(error, DistError)
