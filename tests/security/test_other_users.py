"""Processes of other users of this host get no more than health without a token, and no token that is not theirs."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import hosting
from support.attached import TOKEN, offer
from support.connecting import dial
from support.users import as_other_user, as_root

from rankmesh._session.session import current
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import measure
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.http_client import HttpClient, NoResponseError
from rankmesh_agent.net.peer_credentials import check_peer
from rankmesh_agent.remote.address import socket_path
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Add, Set
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.hello import MAGIC, Service, client_script, hello

pytestmark = [as_root, hosting.embedded_only("the agents of the tests have a token")]


@pytest.fixture
def rank(alone: None) -> Any:
    """This process's agent, which has no token."""
    session = current()
    assert session is not None
    return session.agent


@pytest.fixture
def standalone(rank: Any) -> Iterator[Standalone]:
    agent = Standalone(Settings(), lambda: None, host="127.0.0.1")
    agent.start()
    yield agent
    agent.close()


def ask(url: str, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    """Return status and text of a response."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()


ATTACHMENTS = {
    Service.STORE: store_frames.NO_STORE_ID,
    Service.SNAPSHOT: b"",
    Service.ATTACH: bytes(attach_frames.ATTACHMENT_BYTES),
}


def greet(sock: socket.socket, service: Service) -> str:
    """Greet a service without a token."""
    script = client_script(hello("", ATTACHMENTS[service]), AuthenticationError("refused"))
    Handshake(sock, service, script, client=True).run(10)
    return "admitted"


def greet_at(url: str, service: Service) -> str:
    """Greet a service at the port of a URL."""
    split = urlsplit(url)
    with socket.create_connection((split.hostname or "", split.port or 0), 10) as sock:
        return greet(sock, service)


def test_another_user_gets_only_health_over_http(rank: Any):
    url = rank.member.http
    for method, path in [
        ("GET", "/v1/stacks"),
        ("PUT", "/v1/store/key"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    ]:
        status, body = as_other_user(lambda method=method, path=path: ask(url, method, path))
        assert (status, '"code": "other-user"' in body, "RANKMESH_TOKEN" in body) == (403, True, True), body
    for path in ("/health", "/livez", "/readyz"):
        assert as_other_user(lambda path=path: ask(url, "GET", path))[0] == 200
    assert ask(url, "PUT", "/v1/store/key", b"own")[0] in (200, 201, 204)


def test_another_user_gets_nothing_of_the_gateway(rank: Any):
    url = rank.info().gateway
    assert ask(url, "GET", "/v1/ranks")[0] == 200
    for method, path in [("GET", "/v1/ranks"), ("POST", "/v1/join"), ("GET", "/")]:
        assert as_other_user(lambda method=method, path=path: ask(url, method, path))[0] == 403


OTHERS = "AuthenticationError: the other side is another user's, and has no token: set RANKMESH_TOKEN"


@pytest.mark.parametrize("service", [Service.STORE, Service.SNAPSHOT])
def test_another_user_gets_no_service(rank: Any, service: Service):
    url = rank.info().gateway if service is Service.STORE else rank.member.http
    assert greet_at(url, service) == "admitted"
    assert as_other_user(lambda: greet_at(url, service)).startswith(OTHERS)


def test_another_user_cannot_attach(standalone: Standalone):
    url = standalone.urls[0]
    assert as_other_user(lambda: greet_at(url, Service.ATTACH)).startswith(OTHERS)
    path = socket_path(standalone.settings.shm_dir, offer(standalone).id)

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)

    assert as_other_user(connect).startswith("PermissionError")


def client_of_http(url: str) -> object:
    return HttpClient(TOKEN).request("POST", f"{url}/v1/join", {"body": "of the job"}, timeout=10)


def client_of_store(url: str) -> object:
    return StoreClient(url, TOKEN).execute(Set("k", b"body of the job"), 5.0)


def client_of_mesh(url: str) -> object:
    return dial(TcpTransport(TOKEN), url.removeprefix("http://"))


def client_of_probe(url: str) -> object:
    reply = measure(url, TOKEN, 10, 5.0)
    assert not reply.reached
    raise DistNetworkError(reply.error)


@pytest.mark.parametrize("client", [client_of_http, client_of_store, client_of_mesh, client_of_probe])
def test_another_users_port_does_not_get_the_token(client: Callable[[str], object]):
    """Nor anything else: whoever takes the port of a rank that has ended, say."""
    reader, writer = os.pipe()

    def squat() -> str:
        received = b""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(1.0)
            os.write(writer, listener.getsockname()[1].to_bytes(2, "big"))
            with contextlib.suppress(TimeoutError):
                while True:
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        received += sock.recv(1 << 16)
                        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        return received.decode("latin-1")

    with ThreadPoolExecutor(1) as pool:
        squatting = pool.submit(as_other_user, squat)
        port = int.from_bytes(os.read(reader, 2), "big")
        with pytest.raises((DistNetworkError, NoResponseError)):
            client(f"http://127.0.0.1:{port}")
        received = squatting.result().encode("latin-1")
    os.close(reader)
    os.close(writer)
    assert received.startswith((b"\x16\x03", MAGIC))
    assert TOKEN.encode() not in received
    assert b"of the job" not in received


def test_another_user_gets_nothing_of_the_stores_unix_socket(rank: Any):
    rank.store.execute(Set("k", b"v"))
    name = rank.store._connector._unix_socket
    assert name

    def connect() -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0{name}")
            return greet(sock, Service.STORE)

    assert connect() == "admitted"
    assert as_other_user(connect).startswith(OTHERS)


def own_store(rank: Any) -> JobStore:
    """Return another client of the job's store."""
    return JobStore(rank.info().gateway, rank.settings.job_token, rank.store.id)


def test_another_users_unix_socket_is_not_taken_for_the_stores(rank: Any, monkeypatch: pytest.MonkeyPatch):
    """A response that was changed on its way may name it; the client then uses the port."""
    name = f"rankmesh-test-{os.getpid()}"
    for user, reached in ((lambda listen: listen(), True), (as_other_user, False)):
        with socket.socket(socket.AF_UNIX) as rogue, contextlib.closing(own_store(rank)) as client:
            rogue.bind(f"\0{name}")
            user(lambda: rogue.listen(1))
            client._connector._unix_socket = name
            connection = client._connector._connect_unix()
            assert (connection is not None) is reached
            if connection is not None:
                connection.close()
            else:
                assert client.execute(Add("of this user", 1), 10.0) == 1


def test_another_user_is_cut_off_the_mesh():
    listener = TcpTransport().listen("127.0.0.1:0")
    stop = threading.Event()

    def serve() -> None:
        while not stop.wait(0.005):
            for _, connection in listener.accept(listener.descriptors(), lambda identity: True):
                connection.close()

    def connect() -> str:
        dialed, deadline = TcpTransport().dial(listener.address), time.monotonic() + 10
        with contextlib.closing(dialed):
            while time.monotonic() < deadline:
                if dialed.advance() is not None:
                    return "admitted"
        return "no answer"

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert connect() == "admitted"
        assert as_other_user(connect).startswith(OTHERS)
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        listener.close()


def test_a_connection_that_its_process_has_closed_is_of_nobody():
    """The kernel reports root as its user."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def connect_and_close() -> None:
            with socket.create_connection(listener.getsockname(), 10) as sock:
                sock.sendall(b"PUT /v1/store/key HTTP/1.1\r\n\r\n")

        as_other_user(connect_and_close)
        accepted, _ = listener.accept()
        with accepted, pytest.raises(DistNetworkError, match="the client has closed"):
            check_peer(accepted)
