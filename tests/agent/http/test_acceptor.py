"""Connections, and the servers that get them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from rankmesh_agent.http.acceptor import Accepted, Acceptor
from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.sockets import bind, listen_unix
from rankmesh_agent.wire.hello import Service, preface

REQUEST = preface(Service.SNAPSHOT)


class Port:
    """A port whose acceptor runs in a thread."""

    def __init__(self) -> None:
        self.listener = bind("127.0.0.1", 0, purpose="test")
        self.handlers = {Service.SNAPSHOT: self.respond}
        self.forwarded: SimpleQueue[Accepted] = SimpleQueue()
        self.unix, self.name = listen_unix()
        acceptor = Acceptor(self.listener, [self.unix], self.handlers, [b"torch"], self.forwarded.put)
        self.threads = ThreadPoolExecutor(1)
        self.result: Future[None] = self.threads.submit(acceptor.run)

    def respond(self, sock: socket.socket, admission: Admission) -> None:
        admission.end()
        with sock:
            assert sock.recv(len(REQUEST)) == REQUEST, "it has not been read"
            sock.sendall(b"served")

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), 20)
        sock.sendall(data)
        return sock

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.result.result(20)
        self.listener.close()
        self.unix.close()
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


@pytest.mark.parametrize(("data", "answer"), [(REQUEST, b"served"), (b"GET / HTTP", b"")])
def test_a_unix_socket_brings_clients_of_services_alone(port, data, answer):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{port.name}")
        client.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # it has sent what was not read
            while data := client.recv(100):
                received += data
        assert received == answer
    assert port.forwarded.empty()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\3\1", b"torch", b"t"])
def test_a_client_of_another_protocol_is_forwarded_and_nothing_is_lost(port, data):
    with port.connect(data[:1]) as client:
        client.sendall(data[1:] or b"o HTTP")
        accepted = port.forwarded.get(timeout=20)
        with accepted.sock as sock:
            assert sock.getpeername() == client.getsockname()
            assert accepted.start
            sock.settimeout(20)
            received = sock.recv(1000)
            while received != (data if len(data) > 1 else b"to HTTP"):
                received += sock.recv(1000)
            accepted.admission.end()
    assert served(port)


def test_a_client_whose_protocol_is_not_clear_yet_waits(port):
    with port.connect(b"torc") as client:
        assert served(port)
        assert port.forwarded.empty()
        client.sendall(b"h")
        accepted = port.forwarded.get(timeout=20)
        assert accepted.start == b"torch"
        accepted.sock.close()


def test_the_oldest_idle_client_makes_room(port, two_unauthenticated):
    with contextlib.ExitStack() as clients:
        idle = [clients.enter_context(port.connect(REQUEST[:part])) for part in (0, 5, 0, 5)]
        assert served(port)
        for client in idle[:3]:
            with contextlib.suppress(ConnectionResetError):  # it has sent what was not read
                assert client.recv(1) == b""
    assert not port.result.done()


def test_a_handler_that_fails_closes_its_connection_alone(port, monkeypatch, caplog):
    failed = threading.Event()

    def fail(sock: socket.socket, admission: Admission) -> None:
        failed.set()
        raise OSError("no descriptors")

    monkeypatch.setitem(port.handlers, Service.SNAPSHOT, fail)
    with port.connect(REQUEST) as client, contextlib.suppress(ConnectionResetError):  # the PREFACE was not read
        assert client.recv(1) == b""
    assert failed.is_set()
    monkeypatch.setitem(port.handlers, Service.SNAPSHOT, port.respond)
    assert served(port)
    assert "no descriptors" in caplog.text
