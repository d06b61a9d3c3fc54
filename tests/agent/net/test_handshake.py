"""The driver of handshakes, blocking and not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.handshake import HELLO_BYTES, Challenge, Protocol, client_script, server_script

REFUSAL = AuthenticationError("refused")


def challenge(token: str, *, client: bool = True) -> Challenge:
    return Challenge(token, Protocol.STORE, client=client)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    with client, server:
        yield client, server


def test_a_blocking_client_and_a_server_that_does_not_block(ends):
    client, server = ends
    server.setblocking(False)
    serving = Handshake(server, server_script(challenge("secret", client=False)))
    assert (serving.advance(), serving.started) == (None, False)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Handshake(client, client_script(challenge("secret"), REFUSAL)).run, 10.0)
        while (served := serving.advance()) is None:
            pass
        assert connecting.result().name == served.name
    assert client.gettimeout() is None
    client.sendall(b"next")
    assert server.recv(10) == b"next", "no byte after the handshake has been read"


def test_messages_that_arrive_byte_by_byte(ends):
    client, server = ends
    server.setblocking(False)
    serving = Handshake(server, server_script(challenge("secret", client=False)))
    ours = challenge("secret")

    def send(data: bytes) -> Challenge | None:
        for byte in data:
            assert served is None
            client.send(bytes([byte]))
            found = serving.advance()
        return found

    served = None
    served = send(ours.hello())
    ours.receive_hello(client.recv(HELLO_BYTES))
    served = send(ours.proof())
    assert served is not None
    assert served.name == ours.name


@pytest.mark.parametrize("received", [0, HELLO_BYTES])
def test_the_end_of_the_connection_is_no_refusal(ends, received):
    """A server that fails, or has no descriptors left, closes it at any moment."""
    client, server = ends
    server.send(challenge("secret", client=False).hello()[:received])
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        Handshake(client, client_script(challenge("secret"), REFUSAL)).run(10.0)


def test_a_refusal(ends, caplog, monkeypatch):
    """The server says so before it closes the connection, and in its log."""
    monkeypatch.setattr("rankmesh_agent.net.peer_credentials._warn_at", 0.0)
    client, server = ends
    with ThreadPoolExecutor() as threads:
        refusing = threads.submit(Handshake(server, server_script(challenge("secret", client=False))).run, 10.0)
        with pytest.raises(AuthenticationError) as caught:
            Handshake(client, client_script(challenge("another"), REFUSAL)).run(10.0)
        assert caught.value is REFUSAL
        with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
            refusing.result()
    assert "refused a connection: the other side has another token" in caplog.text


def test_a_time_limit_of_the_whole_handshake(ends):
    with pytest.raises(TimeoutError, match=r"not complete after 0\.05 s"):
        Handshake(ends[0], client_script(challenge("secret"), REFUSAL)).run(0.05)
