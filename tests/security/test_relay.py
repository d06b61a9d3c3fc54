"""A man in the middle between two hosts, without the token: the connection ends, nothing runs, no value is wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.attached import TOKEN, attach, gateway, offer
from support.connecting import meet, recv_exactly, send_all
from support.processes import wait_until
from support.relay import TAMPERS, Relay, relayed

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.options import Options
from rankmesh_agent.net import tls
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.http_client import HttpClient, NoResponseError
from rankmesh_agent.net.tls_socket import TlsSocket
from rankmesh_agent.remote.agent import RemoteAgent
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.client_connection import Connector
from rankmesh_agent.store.commands import Add, Get, Set
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import DistNetworkError, RankFailedError
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_gateway.diagnosis.snapshots import fetch_snapshot
from rankmesh_gateway.state.registry import Registry

NOW = Options(10.0)
DIRECTIONS = "to the server", "to the client"
_jobs = (f"job-{number}" for number in itertools.count())
pytestmark = [pytest.mark.parametrize("name", TAMPERS), pytest.mark.parametrize("direction", DIRECTIONS)]


@pytest.fixture(autouse=True)
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients use TLS, as they do towards another host."""
    monkeypatch.setattr(tls, "is_trusted_listener", lambda host, port: False)


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
def attached(standalone: Standalone, relay: Relay) -> Iterator[RemoteAgent]:
    """A process that is attached to the agent through the relay."""
    wait_until(lambda: standalone.leases.lease is None, "the end of the lease before")
    there = offer(standalone, nearby=False)
    there.urls = [f"http://127.0.0.1:{relay.port}"]
    made = attach(standalone, 0, 1, job=next(_jobs), offer=there)
    yield made
    made.close()


def test_calls_of_an_attached_process(attached: RemoteAgent, relay: Relay, direction: str, name: str) -> None:
    array = np.arange(1000, dtype=np.float32)
    attached.world.all_reduce(array, ReduceOp.SUM, NOW)
    relay.tamper(direction, TAMPERS[name])
    with contextlib.suppress(RankFailedError, DistNetworkError):
        attached.world.all_reduce(array, ReduceOp.SUM, NOW)
    assert relay.tampered()
    assert (array == np.arange(1000)).all()
    assert array.tobytes()[-400:] not in relay.seen


def test_commands_of_an_attached_process(attached: RemoteAgent, relay: Relay, direction: str, name: str) -> None:
    store = attached.store
    store.execute(Set("secret", b"which nobody sees"))
    relay.tamper(direction, TAMPERS[name])
    done = 0
    with contextlib.suppress(DistNetworkError):
        done = store.execute(Add("count", 5))
    assert relay.tampered()
    assert done in (0, 5)
    with contextlib.suppress(DistNetworkError):  # the first connection of the pool may have ended with it
        store.execute(Get("secret"))
    assert store.execute(Add("count", 0)) in ((5,) if done else (0, 5))
    assert b"which nobody sees" not in relay.seen


def test_commands_of_a_store(monkeypatch: pytest.MonkeyPatch, direction: str, name: str) -> None:
    """The client may repeat a request over another connection: it is executed once."""
    import rankmesh as dist

    monkeypatch.setattr(Connector, "_connect_unix", lambda self: None)
    monkeypatch.setenv("RANKMESH_TOKEN", TOKEN)
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with relayed("127.0.0.1", master.port) as relay:
        client = StoreClient(f"http://127.0.0.1:{relay.port}", TOKEN)
        client.execute(Set("secret", b"which nobody sees"), 10.0)
        assert all(isinstance(each.sock, TlsSocket) for each in client._pool._all)
        relay.tamper(direction, TAMPERS[name])
        done = 0
        with contextlib.suppress(DistNetworkError):
            done = client.execute(Add("count", 5), 10.0)
        assert relay.tampered()
        assert done in (0, 5)
        assert client.execute(Add("count", 0), 10.0) in ((5,) if done else (0, 5))
        assert b"which nobody sees" not in relay.seen
        client.close()
    master.close()


def test_http(standalone: Standalone, relay: Relay, direction: str, name: str) -> None:
    with contextlib.closing(HttpClient(TOKEN)) as client:
        url = f"http://127.0.0.1:{relay.port}/v1/info"
        found = client.request("GET", url, timeout=10)
        assert found.status == 200
        relay.tamper(direction, TAMPERS[name])
        again = None
        with contextlib.suppress(NoResponseError):
            again = client.request("GET", url, timeout=10)
    assert relay.tampered()
    assert again is None or (again.status, again.json()["member"]) == (200, found.json()["member"])
    assert TOKEN.encode() not in relay.seen


def test_snapshots(standalone: Standalone, attached: RemoteAgent, relay: Relay, direction: str, name: str) -> None:
    """Of any bytes of the connection, those of its handshake included."""
    job = standalone.leases.lease.job
    url, own = f"http://127.0.0.1:{relay.port}", for_job(TOKEN, job)
    found = fetch_snapshot(url, own, 10.0)
    assert found is not None
    relay.tamper(direction, TAMPERS[name])
    again: Any = None
    with contextlib.suppress(OSError, ValueError, DistNetworkError):
        again = fetch_snapshot(url, own, 10.0)
    assert relay.tampered()
    assert again is None or again["job"] == job


def test_frames_between_ranks(direction: str, name: str) -> None:
    listener = TcpTransport(TOKEN).listen("127.0.0.1:0")
    host, port = listener.address.split(":")
    data = np.random.default_rng(1).bytes(5000)
    with relayed(host, int(port)) as relay:
        (client,), ((_, server),) = meet([TcpTransport(TOKEN).dial(f"127.0.0.1:{relay.port}")], listener)
        source, target = (client, server) if direction == "to the server" else (server, client)
        send_all(source, data, Deadline(10))
        assert recv_exactly(target, len(data), Deadline(10)) == data
        relay.tamper(direction, TAMPERS[name])
        send_all(source, data, Deadline(10))
        with pytest.raises(DistNetworkError):
            recv_exactly(target, len(data) + 1, Deadline(10))
        assert data[-100:] not in relay.seen
        for each in (client, server):
            each.close()
    listener.close()
