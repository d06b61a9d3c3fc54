"""A man in the middle of the store's connection between hosts: no request and no response is changed unnoticed."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.relay import TAMPERS, Relay, relayed
from support.served_store import ServedStore

from rankmesh_agent.http.app import create_store_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net import mac_socket
from rankmesh_agent.net.mac_socket import MacSocket
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Add, Append, Get, MultiGet, MultiSet, QueuePush, Set, Wait
from rankmesh_agent.store.server import SingleTable, StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.handshake import Challenge
from rankmesh_agent.wire.store_frames import UPGRADE


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_socket, "leaves_host", lambda sock: True)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay before a store, whose unix socket the client cannot reach, as on another host."""
    monkeypatch.setattr(StoreClient, "_connect_unix", lambda self: None)
    server = StoreServer(SingleTable(Table(), "secret"), "secret")
    listener = bind("127.0.0.1", 0, purpose="test")
    url = urlsplit(url_of(listener))
    running = HttpServer(listener, "store")
    running.start(lambda: create_store_app(ServedStore(), token="secret"), {UPGRADE: server})
    try:
        with relayed(str(url.hostname), int(url.port or 0)) as made:
            yield made
    finally:
        running.close()
        server.close()


@pytest.fixture
def client(relay: Relay) -> Iterator[StoreClient]:
    made = StoreClient(f"http://127.0.0.1:{relay.port}", "secret")
    yield made
    made.close()


def socket_of(client: StoreClient) -> socket.socket:
    (connection,) = client._pool._all
    return connection.sock


CHANGED = "changed, repeated, left out, inserted or moved on its way"


def run_with(client: StoreClient, relay: Relay, direction: str, name: str, command: Any, times: int = 1) -> list[Any]:
    """Execute a command after one that makes records to replay and reflect; return the results."""
    client.execute(Set("other", b"1"), 10.0)
    assert isinstance(socket_of(client), MacSocket)
    relay.tamper(direction, TAMPERS[name])
    return [client.execute(command, 10.0) for _ in range(times)]


@pytest.mark.parametrize("name", TAMPERS)
def test_a_response_that_is_not_the_owners_is_an_error(between_hosts, relay, client, name):
    """The call is not repeated: whether it was executed is not known."""
    with pytest.raises(DistNetworkError) as caught:
        run_with(client, relay, "to the client", name, Add("count", 5))
    assert relay.tampered()
    assert CHANGED in caught.value.message
    assert f"the store at http://127.0.0.1:{relay.port}" in caught.value.message
    assert "whether add was executed is not known" in caught.value.message
    assert client.execute(Add("count", 0), 10.0) == 5, (
        "the next call has another connection; the owner executed one add"
    )


@pytest.mark.parametrize("name", TAMPERS)
def test_a_request_that_is_not_the_clients_is_not_executed(between_hosts, relay, client, name, caplog):
    """The owner closes the connection, and the client repeats the request over another one: it is executed once."""
    with caplog.at_level(logging.WARNING, "rankmesh"):
        assert run_with(client, relay, "to the server", name, Add("count", 5)) == [5]
    assert relay.tampered()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, warnings
    assert "the connection to 127.0.0.1 is closed" in warnings[0]
    assert CHANGED in warnings[0]
    assert client.execute(Add("count", 0), 10.0) == 5


def test_a_repeated_request_is_executed_once(between_hosts, relay, client):
    client.execute(Set("other", b"1"), 10.0)
    relay.tamper("to the server", lambda seen: 2 * seen.record)
    assert client.execute(Add("count", 5), 10.0) == 5
    assert client.execute(Add("count", 5), 10.0) == 10
    assert relay.tampered()


def test_a_repeated_response_is_no_response_to_the_next_request(between_hosts, relay, client):
    client.execute(Set("other", b"1"), 10.0)
    relay.tamper("to the client", lambda seen: 2 * seen.record)
    assert client.execute(Get("other"), 10.0) == b"1"
    with pytest.raises(DistNetworkError, match=CHANGED):
        client.execute(Add("count", 5), 10.0)


@pytest.mark.parametrize("direction", ["to the server", "to the client"])
def test_a_record_that_is_cut_is_a_lost_connection(between_hosts, relay, client, direction):
    """As without a relay: the request is repeated over another connection, and the owner executes it once."""

    def cut(seen: Any) -> bytes:
        for end in list(relay._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
        return bytes(seen.record[:-3])

    client.execute(Set("other", b"1"), 10.0)
    relay.tamper(direction, cut)
    assert client.execute(Add("count", 5), 10.0) == 5
    assert client.execute(Add("count", 0), 10.0) == 5


@pytest.mark.parametrize("size", [0, 1, 100, (1 << 13) - 60, 1 << 16, 3_000_001])
def test_values_are_those_without_macs(between_hosts, client, size):
    value = bytes(range(251)) * (size // 251) + bytes(size % 251)
    client.execute(Set("key", value), 10.0)
    assert client.execute(Get("key"), 10.0) == value
    assert client.execute(MultiGet(("key", "key")), 10.0) == [value, value]
    client.execute(Append("key", b"more"), 10.0)
    assert client.execute(Get("key"), 10.0) == value + b"more"
    client.execute(MultiSet((("a", value), ("b", b""))), 10.0)
    client.execute(Wait(("a", "b"), 1.0), 10.0)
    client.execute(QueuePush("queue", value), 10.0)
    assert isinstance(socket_of(client), MacSocket)


@pytest.mark.parametrize("wants", ["client", "server"])
def test_both_ends_agree(monkeypatch, relay, client, wants):
    """One end takes the connection for one that leaves the host: the other follows."""
    monkeypatch.setattr(
        mac_socket, "leaves_host", lambda sock: (sock.getpeername()[1] == relay.port) is (wants == "client")
    )
    assert client.execute(Add("count", 5), 10.0) == 5
    assert isinstance(socket_of(client), MacSocket)


def test_within_a_host_and_without_a_token_are_no_macs(monkeypatch, relay, client):
    assert client.execute(Add("count", 5), 10.0) == 5
    assert type(socket_of(client)) is socket.socket
    monkeypatch.setattr(mac_socket, "leaves_host", lambda sock: True)
    assert not mac_socket.wants_macs(socket_of(client), "")
    assert mac_socket.wants_macs(socket_of(client), "secret")


@pytest.mark.parametrize("end", ["client", "server"])
def test_macs_cannot_be_negotiated_away(between_hosts, monkeypatch, client, end):
    """A relay removes the flag from a HELLO: the proofs do not match."""
    original = Challenge.receive_hello

    def receive_hello(self: Challenge, data: bytes) -> None:
        if self.is_client is (end == "client"):
            data = data[:7] + bytes([data[7] & 0x7F]) + data[8:]
        original(self, data)

    monkeypatch.setattr(Challenge, "receive_hello", receive_hello)
    with pytest.raises(AuthenticationError):
        client.execute(Add("count", 5), 10.0)
