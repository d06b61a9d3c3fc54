"""A man in the middle between an attached process and its agent on another host: no frame is changed unnoticed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.attached import TOKEN, attach, gateway, offer
from support.processes import wait_until
from support.relay import TAMPERS, Relay, relayed

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.options import Options
from rankmesh_agent.net import mac_socket
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.mac_socket import MacSocket
from rankmesh_agent.net.stream import FramedStream
from rankmesh_agent.remote.agent import RemoteAgent
from rankmesh_agent.remote.client import AgentDialer
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.commands import Add, Get, Set
from rankmesh_agent.wire.errors import DistNetworkError, RankFailedError
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_gateway.state.registry import Registry

CHANGED = "changed, repeated, left out, inserted or moved on its way"
NOW = Options(10.0)
_jobs = (f"job-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def standalone() -> Iterator[Standalone]:
    with gateway(Registry()) as url:
        agent = Standalone(Settings(token=TOKEN), lambda: url, host="127.0.0.1", name="agent-0")
        agent.start()
        yield agent
        agent.close()


@pytest.fixture
def relay(standalone: Standalone) -> Iterator[Relay]:
    url = urlsplit(standalone.urls[0])
    with relayed(str(url.hostname), int(url.port or 0)) as made:
        yield made


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch, relay: Relay, standalone: Standalone) -> None:
    """Only the connections through the relay leave the host: at the agent they look like others of 127.0.0.1."""
    monkeypatch.setattr(mac_socket, "leaves_host", lambda sock: sock.getpeername()[1] == relay.port)


@pytest.fixture
def attached(between_hosts: None, standalone: Standalone, relay: Relay) -> Iterator[RemoteAgent]:
    """A process that is attached to the agent through the relay."""
    made = attach_through(standalone, relay)
    yield made
    made.close()


def attach_through(standalone: Standalone, relay: Relay) -> RemoteAgent:
    wait_until(lambda: standalone.leases.lease is None, "the end of the lease before")
    there = offer(standalone, nearby=False)
    there.urls = [f"http://127.0.0.1:{relay.port}"]
    return attach(standalone, 0, 1, job=next(_jobs), offer=there)


def all_reduce(attached: RemoteAgent, count: int = 4) -> list[float]:
    array = np.arange(count, dtype=np.float32)
    attached.world.all_reduce(array, ReduceOp.SUM, NOW)
    assert (array == np.arange(count, dtype=np.float32)).all()
    return array.tolist()


def streams(attached: RemoteAgent) -> list[FramedStream]:
    return [attached._client._control, *attached._client._pool._all]


@pytest.mark.parametrize("name", TAMPERS)
def test_a_response_that_is_not_the_agents_is_an_error(attached, relay, name):
    all_reduce(attached)
    relay.tamper("to the client", TAMPERS[name])
    with pytest.raises(RankFailedError) as caught:
        all_reduce(attached)
    assert relay.tampered()
    assert CHANGED in caught.value.message
    assert "the agent of this rank, 'agent-0' at http" in caught.value.message


@pytest.mark.parametrize("name", TAMPERS)
def test_a_request_that_is_not_the_processs_is_not_executed(attached, relay, caplog, name):
    store = attached.blocking_store()
    store.execute(Set("other", b"1"))
    relay.tamper("to the server", TAMPERS[name])
    with caplog.at_level(logging.WARNING, "rankmesh"), pytest.raises(DistNetworkError, match="agent-0"):
        store.execute(Add("count", 5))
    assert relay.tampered()
    assert any(
        "the connection to 127.0.0.1 is closed" in record.getMessage() and CHANGED in record.getMessage()
        for record in caplog.records
    )
    assert store.execute(Add("count", 1)) == 1


def test_a_repeated_request_is_executed_once(attached, relay):
    store = attached.blocking_store()
    store.execute(Set("other", b"1"))
    relay.tamper("to the server", lambda seen: 2 * seen.record)
    assert store.execute(Add("count", 5)) == 5
    with pytest.raises(DistNetworkError):  # the agent has closed the connection
        store.execute(Add("count", 5))
    assert store.execute(Add("count", 0)) == 5


@pytest.mark.parametrize("direction", ["to the server", "to the client"])
def test_a_lease_that_is_tampered_with_is_not_given(between_hosts, standalone, relay, monkeypatch, direction):
    """The first record to the agent is the request to lease it; the first one to the process is the response."""
    original = AgentDialer.connect

    def connect(self: AgentDialer, deadline: Deadline) -> FramedStream:
        stream = original(self, deadline)
        relay.tamper(direction, TAMPERS["changed data"])
        return stream

    monkeypatch.setattr(AgentDialer, "connect", connect)
    with pytest.raises(DistNetworkError, match="as this process joined"):
        attach_through(standalone, relay)
    assert relay.tampered()


@pytest.mark.parametrize("count", [1, 1000, 30_000, 1_000_001])
def test_calls_are_those_without_macs(attached, count):
    all_reduce(attached, count)
    store = attached.blocking_store()
    value = bytes(range(250)) * (count // 250 + 1)
    store.execute(Set("key", value))
    assert store.execute(Get("key")) == value
    found = streams(attached)
    assert len(found) >= 2
    assert all(isinstance(each.sock, MacSocket) for each in found)


def test_within_a_host_are_no_macs(standalone, relay):
    attached = attach_through(standalone, relay)
    all_reduce(attached)
    assert not any(isinstance(each.sock, MacSocket) for each in streams(attached))
    attached.close()
