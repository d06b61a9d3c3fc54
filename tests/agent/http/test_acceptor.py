"""Connections that are accepted before the HTTP server is loaded."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rankmesh_agent.http import acceptor
from rankmesh_agent.http.acceptor import PrefaceAcceptor, Services
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.wire.hello import Service, Verdict, preface, welcome

REQUEST = preface(Service.SNAPSHOT)


class Port:
    """A port whose acceptor runs in a thread."""

    def __init__(self) -> None:
        self.listener = bind("127.0.0.1", 0, purpose="test")
        self.handlers = {Service.SNAPSHOT: self.respond}
        self.acceptor = PrefaceAcceptor(self.listener, Services(self.handlers))
        self.threads = ThreadPoolExecutor(1)
        self.result: Future[list[socket.socket]] = self.threads.submit(self.acceptor.run)

    def respond(self, sock: socket.socket) -> None:
        with sock:
            assert sock.recv(len(REQUEST)) == REQUEST, "it has not been read"
            sock.sendall(b"served")

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), 20)
        sock.sendall(data)
        return sock

    def close(self) -> None:
        if not self.result.done():
            self.listener.shutdown(socket.SHUT_RDWR)
        self.result.result(20)
        self.acceptor.close()
        self.listener.close()
        self.threads.shutdown()


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


def served(port: Port) -> bool:
    with port.connect(REQUEST) as client:
        return client.recv(1000) == b"served"


def test_clients_that_send_nothing_or_little_delay_no_other(port):
    with port.connect(), port.connect(REQUEST[:5]) as slow:
        assert served(port)
        for byte in REQUEST[5:]:
            slow.sendall(bytes([byte]))
        assert slow.recv(1000) == b"served"
    assert served(port)
    assert not port.result.done()


@pytest.mark.parametrize("data", [b"", REQUEST[:5]])
def test_clients_that_go_are_closed(port, data):
    with port.connect(data) as client:
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it has sent what was not read
            assert client.recv(1) == b""
    assert served(port)


def test_a_client_of_http_ends_it_and_nothing_is_lost(port):
    with port.connect() as idle, port.connect(b"GET / HTTP/1.1\r\n") as client:
        accepted = port.result.result(20)
        assert {sock.getpeername() for sock in accepted} >= {client.getsockname()}
        (found,) = (sock for sock in accepted if sock.getpeername() == client.getsockname())
        assert found.recv(1000) == b"GET / HTTP/1.1\r\n"
        assert idle.fileno() >= 0


def test_the_oldest_idle_client_makes_room(port, two_unauthenticated):
    with contextlib.ExitStack() as clients:
        idle = [clients.enter_context(port.connect(REQUEST[:part])) for part in (0, 5, 0, 5)]
        assert served(port)
        for client in idle[:3]:
            with contextlib.suppress(ConnectionResetError):  # it has sent what was not read
                assert client.recv(1) == b""
    assert not port.result.done()


def test_an_idle_client_is_closed(port, monkeypatch):
    monkeypatch.setattr(acceptor, "HEAD_SECONDS", 0.1)
    with port.connect() as idle:
        assert idle.recv(1) == b""
    assert served(port)


def test_a_service_that_it_does_not_have_is_refused(port):
    with port.connect(preface(Service.STORE)) as client:
        assert client.recv(100) == welcome(Verdict.OTHER_SERVICE)
        assert client.recv(1) == b""
    assert served(port)


def test_a_handler_that_fails_closes_its_connection_alone(port, monkeypatch, caplog):
    failed = threading.Event()

    def fail(sock: socket.socket) -> None:
        failed.set()
        raise OSError("no descriptors")

    monkeypatch.setitem(port.handlers, Service.SNAPSHOT, fail)
    with port.connect(REQUEST) as client, contextlib.suppress(ConnectionResetError):  # the PREFACE was not read
        assert client.recv(1) == b""
    assert failed.is_set()
    monkeypatch.setitem(port.handlers, Service.SNAPSHOT, port.respond)
    assert served(port)
    assert "no descriptors" in caplog.text
