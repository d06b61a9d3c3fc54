"""What an agent finds out of a way, wherever it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.command import Double
from support.pauses import despite_pauses
from support.processes import free_port, plain_http_server

from rankmesh_agent import native
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import AddressNotListedError, Prober, measure
from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import AgentInfo, Member, ProbeRequest

SECONDS = 0.5


class Somebody:
    """As much of an agent as probes need."""

    settings = Settings()

    def info(self) -> AgentInfo:
        return AgentInfo("job", 1, 1, Member(0, "i", "host", "h", 1, [], ""), "", {}, 0.0, "0.1.0")

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    """The URL of an agent that wants the token 'secret'."""
    listener = bind("127.0.0.1", 0, purpose="a test listens")
    url = url_of(listener)
    thread = HttpServer(listener, "agent")
    thread.start(lambda: create_app(Somebody(), token="secret"))
    yield url
    thread.close()


@pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
def test_a_way_that_is_fine(agent: str, nbytes: int):
    reply = measure(agent, "secret", nbytes, 30.0)
    assert (reply.url, reply.reached, reply.stage, reply.error, reply.bytes) == (agent, True, "", "", nbytes)
    assert reply.connect is not None
    assert reply.round_trip is not None
    assert (reply.seconds is not None) == bool(nbytes)


@contextlib.contextmanager
def a_full_queue() -> Iterator[str]:
    """When the queue of a listening socket is full, the kernel drops the packets of further clients."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield url_of(listener)


@contextlib.contextmanager
def a_stopped_process() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts the connections
        yield url_of(listener)


@contextlib.contextmanager
def another_server() -> Iterator[str]:
    with plain_http_server() as port:
        yield f"http://127.0.0.1:{port}"


def serving(serve: Callable[[socket.socket, threading.Event], None]) -> contextlib.AbstractContextManager[str]:
    """A server that does something with its first connection, until the event is set."""

    @contextlib.contextmanager
    def server() -> Iterator[str]:
        ending = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def accept() -> None:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection, ending)

            thread = threading.Thread(target=accept, daemon=True)
            thread.start()
            yield url_of(listener)
            ending.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)

    return server()


def short_answers(connection: socket.socket, ending: threading.Event) -> None:
    while request := connection.recv(4096):
        length = b"0" if b"bytes=0" in request else b"1000"
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n")
        if length != b"0":
            connection.sendall(b"x" * 10)
            ending.wait(10)


def trickle(connection: socket.socket, ending: threading.Event) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not ending.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize(
    ("server", "nbytes", "stage", "error"),
    [
        (lambda: contextlib.nullcontext(f"http://127.0.0.1:{free_port()}"), 0, "refused", "nothing listens there"),
        (a_full_queue, 0, "connect", "packets are dropped on the way"),
        (lambda: contextlib.nullcontext("http://no-such-host.invalid:1"), 0, "name", "cannot be resolved"),
        (a_stopped_process, 0, "answer", "accepts connections, but does not answer"),
        (lambda: serving(short_answers), 1000, "transfer", "10 of 1000 bytes came"),
        (lambda: serving(trickle), 0, "stranger", "sends more bytes than requested"),
        (lambda: serving(lambda connection, ending: None), 0, "answer", "ended the connection"),
        (another_server, 0, "stranger", "it is not an agent"),
    ],
    ids=[
        "nobody",
        "a firewall",
        "a name",
        "a stopped process",
        "lost packets",
        "a trickle",
        "an end",
        "another server",
    ],
)
@despite_pauses
def test_a_broken_path(server, nbytes: int, stage: str, error: str):
    with server() as url:
        reply = measure(url, "", nbytes, SECONDS)
    assert (reply.reached, reply.stage, error in reply.error) == (False, stage, True), reply.error
    assert (reply.connect is None) == (stage in ("refused", "connect", "name"))


def test_a_token_of_another_job(agent: str):
    reply = measure(agent, "another", 0, 30.0)
    assert (reply.reached, reply.stage, reply.connect is not None) == (False, "token", True)
    assert "rejects the token of this agent" in reply.error


@pytest.fixture
def gateway() -> Iterator[Double]:
    made = Double()
    agents = [{"agent": {"urls": ["http://10.0.0.7:1", "http://10.0.0.8:1"]}}]
    states = {0: "alive", 1: "failed", 2: "left"}
    ranks = [{"state": state, "member": {"http": f"http://10.0.0.{rank}:800{rank}"}} for rank, state in states.items()]
    made.answers = {"/v1/ranks": ranks, "/v1/agents": agents}
    yield made
    made.close()


class TestWhoIsAsked:
    @pytest.fixture(autouse=True)
    def nobody_is_really_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rankmesh_agent.diagnostics.probe.measure", lambda *arguments: arguments)

    def probe(self, gateway: str, url: str) -> object:
        return Prober(lambda: gateway, Settings, str).probe(ProbeRequest(url, 5, 2.0))

    def test_those_that_the_gateway_lists(self, gateway: Double):
        for url in ("http://10.0.0.0:8000", "http://10.0.0.1:8001", "http://10.0.0.7:1", "http://10.0.0.8:1"):
            assert self.probe(gateway.url, url) == (url, "", 5, 2.0)

    def test_nobody_else(self, gateway: Double):
        host, path = "http://169.254.169.254/latest", "http://10.0.0.0:8000/v1/x"
        for url in ("http://10.0.0.2:8002", host, path, "file:///etc/passwd", ""):  # the first has left
            with pytest.raises(AddressNotListedError, match="the gateway lists no agent at"):
                self.probe(gateway.url, url)
        with pytest.raises(DistNetworkError, match="does not say which agents there are"):
            self.probe(f"http://127.0.0.1:{free_port()}", "http://10.0.0.0:8000")

    def test_the_list_is_kept_for_a_moment(self, gateway: Double):
        prober = Prober(lambda: gateway.url, Settings, str)
        for _ in range(3):
            prober.probe(ProbeRequest("http://10.0.0.0:8000"))
        assert gateway.asked == ["/v1/ranks", "/v1/agents"]
        with pytest.raises(AddressNotListedError):
            prober.probe(ProbeRequest("http://10.0.0.9:8000"))
        assert len(gateway.asked) == 4


def test_the_properties_of_the_host(tmp_path):
    settings = Settings(shm_dir=str(tmp_path), slot_bytes=1 << 16, transport="tcp")
    report = Prober(str, lambda: settings, lambda: "secret").host()
    assert (report.shm_dir, report.slot_bytes, report.transport, report.token) == (str(tmp_path), 65536, "tcp", True)
    assert report.native_trouble == native.reason
    assert report.shm_total is not None
    assert report.shm_free is not None
    assert 0 <= report.shm_free <= report.shm_total
    report = Prober(str, lambda: Settings(shm_dir="/no/such"), str).host()
    assert (report.shm_total, report.shm_free, report.token, bool(report.shm_trouble)) == (None, None, False, True)
