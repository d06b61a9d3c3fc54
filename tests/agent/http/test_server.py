"""An application served from a thread: at once, or when the first client has come."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import select
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest

from rankmesh_agent.http import acceptor, middleware, uvicorn_server
from rankmesh_agent.http.acceptor import Accepted
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.http.uvicorn_server import MAX_HEAD_BYTES
from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.hello import Service, Verdict, preface, welcome

ended: list[str] = []


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            assert await receive() == {"type": f"lifespan.{step}"}
            await send({"type": f"lifespan.{step}.complete"})
        ended.append("hello")
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


class Served:
    """An HttpServer on a free port that notes when its application is made."""

    def __init__(self, services: Mapping[Service, Any] = MappingProxyType({}), *, on_demand: bool) -> None:
        self.listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")
        self.url = url_of(self.listener)
        self.made = threading.Event()
        self.times_made = 0
        self.server = HttpServer(self.listener, "served")
        self.server.start(self.make, services, on_demand=on_demand)

    def make(self) -> Any:
        self.made.set()
        self.times_made += 1
        return hello

    def ask(self) -> bytes:
        with urllib.request.urlopen(self.url, timeout=20) as answer:
            return bytes(answer.read())


def is_served(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_at_once():
    served = Served(on_demand=False)
    assert served.made.wait(20)
    assert served.ask() == b"hello"
    served.server.close()
    assert not is_served("served")
    assert served.server.url() == served.url  # a service prints it, and its server may have failed by then


def test_it_ends_when_told_and_not_at_its_next_look(monkeypatch):

    monkeypatch.setattr(uvicorn_server, "_TICK_SECONDS", 60.0)
    served = Served(on_demand=False)
    assert served.ask() == b"hello"
    served.server.close(timeout=20.0)
    assert not is_served("served")


def test_a_connection_that_comes_at_the_end_is_closed():
    """Its task is cancelled before it has begun."""
    limit = ConnectionLimit("test connections")
    near, far = socket.socketpair()
    server = uvicorn_server.EventDrivenServer(hello, deque([Accepted(near, b"GET", limit.admit(near))]))

    async def begin_and_cancel() -> None:
        server._loop = asyncio.get_running_loop()
        server._begin_accepted()
        (task,) = server._connecting
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)  # the callbacks

    with near, far:
        asyncio.run(begin_and_cancel())
        assert near.fileno() == -1
        assert far.recv(1) == b""
    assert not limit.waiting


def test_a_forked_child_holds_no_connection():
    """Else its client would not see that the server has closed it."""
    served = Served(on_demand=False)
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        received = b""
        while not received.endswith(b"hello"):
            received += client.recv(1000)
        waiting, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            os.read(waiting, 1)
            os._exit(0)
        served.server.close()
        assert client.recv(1) == b""
        os.close(waiting)
        os.close(told)
        assert os.waitpid(child, 0)[1] == 0


def test_it_ends_soon_after_it_had_no_free_descriptor(monkeypatch, caplog):
    """Asyncio waits a second then, and listens again to a port that is closed by then."""
    exhausted, asked = threading.Event(), threading.Event()
    monkeypatch.setattr(acceptor, "warn_exhausted", lambda *_: exhausted.set())

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await asyncio.sleep(1.5)
        await hello(scope, receive, send)

    monkeypatch.setattr(Served, "make", lambda _: slow)
    served = Served(on_demand=False)
    with ThreadPoolExecutor(1) as clients, socket.socket() as late:
        answer = clients.submit(served.ask)
        assert asked.wait(20)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        try:
            late.connect(served.listener.getsockname())
            assert exhausted.wait(20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        served.server.close()
        assert answer.result(20) == b"hello"
    assert not is_served("served")
    assert "Exception" not in caplog.text


def test_a_request_that_does_not_end_is_cancelled_without_a_word(monkeypatch, caplog):
    asked = threading.Event()

    async def endless(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await asyncio.sleep(3600)
        await hello(scope, receive, send)

    monkeypatch.setattr(Served, "make", lambda _: endless)
    served = Served(on_demand=False)
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(served.ask)
        assert asked.wait(20)
        served.server.close(timeout=20.0)
        assert isinstance(answer.exception(20), (OSError, urllib.error.HTTPError))
    assert not is_served("served")
    assert [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"] == []


def test_on_demand_and_not_before():
    served = Served(on_demand=True)
    assert not served.made.wait(0.2)
    assert [served.ask(), served.ask()] == [b"hello", b"hello"]
    assert served.made.is_set()
    served.server.close()
    assert not is_served("served")


def test_who_comes_while_it_is_made_is_answered():
    served = Served(on_demand=True)
    assert ask_four_times(served) == [b"hello"] * 4
    served.server.close()


def ask_four_times(served: Served) -> list[bytes]:
    with ThreadPoolExecutor(4) as clients:
        return list(clients.map(lambda _: served.ask(), range(4)))


class Snapshots:
    """Answers the connections of a service, and closes them."""

    def handle(self, sock: socket.socket, admission: Admission) -> None:
        admission.end()
        with sock:
            assert sock.recv(100) == preface(Service.SNAPSHOT)
            sock.sendall(b"served")

    def close(self) -> None:
        pass


def test_a_connection_of_a_service_needs_no_application():
    served = Served({Service.SNAPSHOT: Snapshots()}, on_demand=True)
    for _ in range(2):
        with socket.create_connection(served.listener.getsockname(), timeout=20) as client:
            client.sendall(preface(Service.SNAPSHOT))
            assert client.recv(1000) == b"served"
    assert not served.made.is_set()
    served.server.close()
    assert not is_served("served")
    assert not served.made.is_set()


@pytest.mark.parametrize("data", [preface(Service.SNAPSHOT), preface(Service.STORE)])
def test_a_service_after_http_on_the_same_port(data):
    """The PREFACE comes in two parts; a service that the port does not have is refused."""
    served = Served({Service.SNAPSHOT: Snapshots()}, on_demand=True)
    assert served.ask() == b"hello"
    with socket.create_connection(served.listener.getsockname(), timeout=20) as client:
        client.sendall(data[:8])
        assert served.ask() == b"hello"
        client.sendall(data[8:])
        expected = b"served" if data == preface(Service.SNAPSHOT) else welcome(Verdict.OTHER_SERVICE)
        assert client.recv(1000) == expected
        assert client.recv(1) == b""
    served.server.close()


def test_with_services_it_is_made_once():
    ended.clear()
    served = Served({Service.SNAPSHOT: Snapshots()}, on_demand=False)
    assert ask_four_times(served) == [b"hello"] * 4
    assert served.times_made == 1
    served.server.close()
    assert ended == ["hello"]


def test_never_asked_it_ends_without_the_application():
    served = Served(on_demand=True)
    served.server.close()
    served.server.close()
    assert not served.made.is_set()
    assert not is_served("served")
    assert served.listener.fileno() == -1


def test_one_that_cannot_be_made_sends_its_clients_away(caplog):
    told = []
    listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")

    def make() -> Any:
        raise ImportError("no framework")

    server = HttpServer(listener, "served")
    server.start(make, on_demand=True, on_failure=lambda: told.append(server.failure))
    # The listener may close before the client has seen that it is connected: then it is the connect that is reset.
    with (
        contextlib.suppress(ConnectionResetError),
        socket.create_connection(listener.getsockname(), timeout=20) as client,
    ):
        client.sendall(b"GET")
        assert client.recv(1) == b""
    server.close()
    assert [text.partition(" (")[0] for text in told] == ["ImportError: no framework"]
    assert "served cannot be served any more: ImportError: no framework" in caplog.text


def _problem_from(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the problem document of the last response of a connection."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert (answer.headers["content-type"], answer.headers["connection"]) == ("application/problem+json", "close")
    return answer.status, json.loads(answer.read())


class TestSlowClients:
    """Each is closed, and the others are served."""

    @pytest.fixture(params=[False, True], ids=["http", "with services"])
    def served(self, request, monkeypatch) -> Iterator[Served]:
        async def read_body(scope: dict[str, Any], receive: Any, send: Any) -> None:
            while scope["type"] == "http" and (await receive()).get("more_body"):
                pass
            await hello(scope, receive, send)

        monkeypatch.setattr(Served, "make", lambda _: SecurityMiddleware(read_body, names=["a"]))
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.2)
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.2)
        monkeypatch.setattr(acceptor, "HEAD_SECONDS", 0.2)
        monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
        monkeypatch.setattr(uvicorn_server, "_TICK_SECONDS", 0.05)
        served = Served({Service.SNAPSHOT: Snapshots()} if request.param else {}, on_demand=False)
        assert served.ask() == b"hello"
        yield served
        assert served.ask() == b"hello"
        served.server.close()

    @pytest.mark.parametrize("begin", [b"", b"GET ", b"GET / HTTP/1.1\r\nHost: a"])
    def test_a_head_that_does_not_end(self, served, begin):
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            client.sendall(begin)
            assert client.recv(100) == b""

    def test_a_second_head_that_does_not_end(self, served):
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b"hello"):
                received += client.recv(1000)
            client.sendall(b"GET /")
            assert client.recv(100) == b""

    @pytest.mark.parametrize("body", [b"", b"a", bytes(99)])
    def test_a_body_that_does_not_end(self, served, body):
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            client.sendall(b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" + body)
            status, document = _problem_from(client)
            assert (status, document["code"], document["retryable"]) == (408, "body-timeout", True)
            assert "without pauses of 0.2 s" in document["detail"]
            assert client.recv(1) == b""

    def test_a_body_that_comes_byte_by_byte(self, served):
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            client.sendall(b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
            with contextlib.suppress(ConnectionError):  # the last byte may meet a closed connection
                while not select.select([client], [], [], 0.02)[0]:
                    client.sendall(b"a")
                assert _problem_from(client)[0] == 408

    def test_a_head_that_comes_byte_by_byte(self, served):
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            client.settimeout(0.05)
            client.sendall(b"GET /")
            while True:
                try:
                    client.sendall(b"a")
                    assert client.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break


class TestInvalidRequests:
    """Each gets a problem document, and its connection ends."""

    @pytest.fixture(params=[False, True], ids=["http", "with services"])
    def served(self, request) -> Iterator[Served]:
        served = Served({Service.SNAPSHOT: Snapshots()} if request.param else {}, on_demand=False)
        yield served
        assert served.ask() == b"hello"
        served.server.close()

    @pytest.mark.parametrize(
        ("sent", "status", "code"),
        [
            (b"GET / HTTP/1.1\r\nHost: a\r\nno field\r\n\r\n", 400, "bad-request"),
            (b"GET /" + b"a" * MAX_HEAD_BYTES, 431, "head-too-large"),
            (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"b" * MAX_HEAD_BYTES, 431, "head-too-large"),
        ],
    )
    def test_it_is_refused(self, served: Served, sent: bytes, status: int, code: str) -> None:
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
            answered, document = _problem_from(client)
        assert (answered, document["status"], document["code"]) == (status, status, code)

    def test_a_second_head_that_is_too_large(self, served: Served) -> None:
        with socket.create_connection(served.listener.getsockname(), 20) as client:
            for head, status in ((b"Host: a\r\n\r\n", 200), (b"A: " + b"b" * MAX_HEAD_BYTES, 431)):
                client.sendall(b"GET / HTTP/1.1\r\n" + head)
                answer = http.client.HTTPResponse(client)
                answer.begin()
                answer.read()
                assert answer.status == status

    def test_a_body_that_is_not_read_is_no_head(self, served: Served) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=20)
        with contextlib.closing(connection):
            for _ in range(2):
                connection.request("PUT", "/", bytes(4 * MAX_HEAD_BYTES))
                assert connection.getresponse().read() == b"hello"
