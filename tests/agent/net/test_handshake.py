"""The driver of handshakes, blocking and not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.net.handshake import Handshake, accept
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.hello import (
    WELCOME_BYTES,
    Client,
    Script,
    Service,
    client_script,
    hello,
    new_name,
    preface,
    welcome,
    welcoming,
)

REFUSAL = AuthenticationError("refused")


def client_of(token: str, name: bytes = b"") -> Script[bytes]:
    return client_script(hello(token, name=name), REFUSAL)


def connecting_with(sock: socket.socket, token: str, name: bytes = b"") -> Handshake[bytes]:
    return Handshake(sock, Service.STORE, client_of(token, name), client=True)


def serving_with(sock: socket.socket, token: str) -> Handshake[Client]:
    return accept(sock, Service.STORE, lambda _: token, 0, token, TlsSettings(), welcoming())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    with client, server:
        yield client, server


def test_a_blocking_client_and_a_server_that_does_not_block(ends):
    client, server = ends
    server.setblocking(False)
    serving, name = serving_with(server, "secret"), new_name()
    assert (serving.advance(), serving.started) == (None, False)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connecting_with(client, "secret", name).run, 10.0)
        while (served := serving.advance()) is None:
            pass
        assert connecting.result() == b""
    assert served.name == name
    assert client.gettimeout() is None
    client.sendall(b"next")
    assert server.recv(10) == b"next", "no byte after the handshake has been read"


def test_messages_that_arrive_byte_by_byte(ends):
    client, server = ends
    server.setblocking(False)
    serving, served = serving_with(server, "secret"), None
    for byte in preface(Service.STORE) + hello("secret"):
        assert served is None
        client.send(bytes([byte]))
        served = serving.advance()
    assert served is not None
    assert client.recv(100) == welcome()


@pytest.mark.parametrize("received", [0, WELCOME_BYTES - 1])
def test_the_end_of_the_connection_is_no_refusal(ends, received):
    """A server that fails, or has no descriptors left, closes it at any moment."""
    client, server = ends
    server.send(welcome()[:received])
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        connecting_with(client, "secret").run(10.0)


def test_a_refusal(ends, caplog, monkeypatch):
    """The server says so before it closes the connection, and in its log."""
    monkeypatch.setattr("rankmesh_agent.net.peer_credentials._warning._next", 0.0)
    client, server = ends
    with ThreadPoolExecutor() as threads:
        refusing = threads.submit(serving_with(server, "secret").run, 10.0)
        with pytest.raises(AuthenticationError) as caught:
            connecting_with(client, "another").run(10.0)
        assert caught.value is REFUSAL
        with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
            refusing.result()
    assert "refused a connection: the other side has another token" in caplog.text


def test_a_time_limit_of_the_whole_handshake(ends):
    with pytest.raises(TimeoutError, match=r"not complete after 0\.05 s"):
        connecting_with(ends[0], "secret").run(0.05)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TimeoutError("the handshake is not complete"), StreamTimeoutError),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), StreamClosedError),
    ],
)
def test_a_host_that_vanishes_breaks_the_connection_and_is_no_time_limit(ends, error, raised, monkeypatch):
    """A call of the store is then made over another connection: the host may be back."""
    monkeypatch.setattr(Handshake, "run", Mock(side_effect=error))
    with pytest.raises(raised):
        FramedStream(ends[0]).greet(connecting_with(ends[0], "secret"), 10.0)
