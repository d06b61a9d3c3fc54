"""Sockets with MACs behave like sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from rankmesh_agent.net.mac_socket import MacSocket
from rankmesh_agent.net.record_socket import RecordChangedError, buffered, committed

DATA = bytes(range(256)) * 800
KEYS = bytes(32), bytes([1]) * 32
Ends = tuple[MacSocket, MacSocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with MacSocket(ours, *KEYS) as client, MacSocket(theirs, *reversed(KEYS)) as server:
        client.settimeout(10)
        server.settimeout(10)
        yield client, server


def test_a_receive_that_is_not_full_leaves_nothing_buffered(ends: Ends) -> None:
    client, server = ends
    assert not buffered(server)
    client.sendall(DATA[:100])
    assert server.recv(10) == DATA[:10]
    assert buffered(server), "the rest of the record is here, and the descriptor not readable"
    assert server.recv(1000) == DATA[10:100]
    assert not buffered(server)


def test_records_that_came_together_are_buffered(ends: Ends) -> None:
    client, server = ends
    client.sendall(b"one")
    client.sendall(b"two")
    assert server.recv(100) == b"one"
    assert buffered(server)
    assert server.recv(100) == b"two"


def test_a_peek_leaves_the_bytes(ends: Ends) -> None:
    client, server = ends
    server.settimeout(None)
    with pytest.raises(BlockingIOError):
        server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    client.sendall(DATA[:100])
    assert server.recv(1, socket.MSG_PEEK) == DATA[:1]
    assert server.recv(1000, socket.MSG_PEEK) == DATA[:100]
    assert server.recv(1000) == DATA[:100]
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1, socket.MSG_PEEK) == b""


def test_a_receive_of_all_waits_for_it(ends: Ends) -> None:
    client, server = ends
    thread = threading.Thread(
        target=lambda: [client.sendall(DATA[begin : begin + 999]) for begin in range(0, 50_000, 999)]
    )
    thread.start()
    into = bytearray(50_000)
    assert server.recv_into(into, 0, socket.MSG_WAITALL) == 50_000
    thread.join(30)
    assert not thread.is_alive()
    assert into == DATA[:50_000]


def test_the_connection_goes_on_after_a_timeout(ends: Ends) -> None:
    client, server = ends
    server.settimeout(0.02)
    client.sendall(b"one")
    into = bytearray(6)
    assert server.recv_into(into, 0, socket.MSG_WAITALL) == 3
    for _ in range(2):
        with pytest.raises(TimeoutError):
            server.recv_into(into)
    client.sendall(b"two")
    assert server.recv(100) == b"two"


def test_what_came_before_an_error_is_received(ends: Ends) -> None:
    client, server = ends
    client.sendall(b"one")
    socket.socket.send(client, bytes(100))
    into = bytearray(100)
    assert server.recv_into(into) == 3
    for _ in range(2):
        with pytest.raises(RecordChangedError):
            server.recv_into(into)
    assert buffered(server), "the error is to be found without another byte"


def test_a_send_goes_on_where_the_last_one_ended(ends: Ends) -> None:
    client, server = ends
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setblocking(False)
    server.setblocking(False)
    sent, found, waited = 0, b"", 0
    while sent < len(DATA):
        try:
            sent += client.send(DATA[sent:])
        except BlockingIOError:
            waited += 1
            assert 0 < committed(client) <= len(DATA) - sent
            with contextlib.suppress(BlockingIOError):
                found += server.recv(1 << 20)
    with contextlib.suppress(BlockingIOError):
        while True:
            found += server.recv(1 << 20)
    assert found == DATA
    assert waited
    assert not committed(client)


@pytest.mark.parametrize("length", [(1 << 16) + 1, (1 << 32) - 1])
def test_a_length_beyond_the_limit_ends_the_connection(ends: Ends, length: int) -> None:
    client, server = ends
    socket.socket.send(client, length.to_bytes(4, "big") + bytes(60))
    with pytest.raises(RecordChangedError):
        server.recv(100)


def test_empty_sends_send_nothing(ends: Ends) -> None:
    client, server = ends
    assert client.send(b"") == 0
    assert client.sendmsg([b"", b""]) == 0
    assert client.sendmsg([b"", b"one", b""]) == 3
    assert server.recv(100) == b"one"
