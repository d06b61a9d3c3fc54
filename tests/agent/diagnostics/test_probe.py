"""What an agent finds out of a way, wherever it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.command import Double, member
from support.processes import free_port, plain_http_server

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


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of somebody who does something with the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield url_of(listener)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
def test_a_way_that_is_fine(agent: str, nbytes: int):
    reply = measure(agent, "secret", nbytes, 30.0)
    assert (reply.url, reply.reached, reply.stage, reply.error, reply.bytes) == (agent, True, "", "", nbytes)
    assert reply.connect is not None
    assert reply.round_trip is not None
    assert (reply.seconds is not None) == bool(nbytes)


def test_a_token_of_another_job(agent: str):
    reply = measure(agent, "another", 0, 30.0)
    assert (reply.reached, reply.stage) == (False, "token")
    assert "rejects the token of this agent" in reply.error
    assert reply.connect is not None


def test_nobody_listens():
    reply = measure(f"http://127.0.0.1:{free_port()}", "", 0, SECONDS)
    assert (reply.reached, reply.stage, reply.connect) == (False, "refused", None)
    assert "nothing listens there" in reply.error


def test_packets_that_are_dropped():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # when its queue is full, the kernel drops who else wants to connect
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        reply = measure(url_of(listener), "", 0, SECONDS)
    assert (reply.reached, reply.stage) == (False, "connect")
    assert "packets are dropped on the way" in reply.error


def test_a_name_that_nobody_knows():
    reply = measure("http://no-such-host.invalid:1", "", 0, SECONDS)
    assert (reply.reached, reply.stage) == (False, "name")


def test_a_process_that_is_stopped():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, nobody answers
        reply = measure(url_of(listener), "", 0, SECONDS)
    assert (reply.reached, reply.stage) == (False, "answer")
    assert "accepts connections, but does not answer" in reply.error


def test_large_packets_that_get_lost():
    ending = threading.Event()

    def short_answers(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            length = b"0" if b"bytes=0" in request else b"1000"
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n")
            if length != b"0":
                connection.sendall(b"x" * 10)
                ending.wait(10)

    with server(short_answers) as url:
        reply = measure(url, "", 1000, SECONDS)
        ending.set()
    assert (reply.reached, reply.stage) == (False, "transfer")
    assert "10 of 1000 bytes came" in reply.error


def test_an_answer_that_trickles_ends_in_time():
    ending = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not ending.wait(0.05):
            connection.sendall(b"x")

    with server(trickle) as url:
        reply = measure(url, "", 0, SECONDS)
        ending.set()
    assert (reply.reached, reply.stage) == (False, "stranger")


def test_a_connection_that_breaks():
    with server(lambda connection: None) as url:
        reply = measure(url, "", 0, SECONDS)
    assert (reply.reached, reply.stage) == (False, "answer")


def test_somebody_else():
    with plain_http_server() as port:
        reply = measure(f"http://127.0.0.1:{port}", "", 0, SECONDS)
    assert (reply.reached, reply.stage) == (False, "stranger")


@pytest.fixture
def gateway() -> Iterator[Double]:
    made = Double()
    agents = [{"agent": {"urls": ["http://10.0.0.7:1", "http://10.0.0.8:1"]}}]
    states = {0: "alive", 1: "failed", 2: "left"}
    ranks = [{"state": state, "member": member(rank)} for rank, state in states.items()]
    made.answers = {"/v1/ranks": ranks, "/v1/agents": agents}
    yield made
    made.close()


class TestWhoIsAsked:
    @pytest.fixture(autouse=True)
    def nobody_is_really_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rankmesh_agent.diagnostics.probe.measure", lambda *arguments: arguments)

    def probe(self, gateway: str, url: str) -> object:
        return Prober(lambda: gateway, Settings, "secret").probe(ProbeRequest(url, 5, 2.0))

    @pytest.mark.parametrize(
        "url", ["http://10.0.0.0:8000", "http://10.0.0.1:8001", "http://10.0.0.7:1", "http://10.0.0.8:1"]
    )
    def test_those_that_the_gateway_lists(self, gateway: Double, url: str):
        assert self.probe(gateway.url, url) == (url, "secret", 5, 2.0)

    @pytest.mark.parametrize(
        "url",
        [
            "http://10.0.0.2:8002",
            "http://169.254.169.254/latest",
            "http://10.0.0.0:8000/v1/x",
            "file:///etc/passwd",
            "",
        ],
        ids=["one that left", "another host", "another path", "a file", "nothing"],
    )
    def test_nobody_else(self, gateway: Double, url: str):
        with pytest.raises(AddressNotListedError, match="the gateway lists no agent at"):
            self.probe(gateway.url, url)

    def test_a_gateway_that_does_not_say(self):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(DistNetworkError, match="does not say which agents there are"):
            self.probe(url, "http://10.0.0.0:8000")

    def test_the_list_is_kept_for_a_moment(self, gateway: Double):
        prober = Prober(lambda: gateway.url, Settings, "")
        for _ in range(3):
            prober.probe(ProbeRequest("http://10.0.0.0:8000"))
        assert gateway.asked == ["/v1/ranks", "/v1/agents"]
        with pytest.raises(AddressNotListedError):
            prober.probe(ProbeRequest("http://10.0.0.9:8000"))
        assert len(gateway.asked) == 4


def test_what_the_host_has(tmp_path):
    settings = Settings(shm_dir=str(tmp_path), slot_bytes=1 << 16, transport="tcp")
    report = Prober(str, lambda: settings, "secret").host()
    assert (report.shm_dir, report.slot_bytes, report.transport, report.token) == (str(tmp_path), 65536, "tcp", True)
    assert report.shm_total is not None
    assert report.shm_free is not None
    assert 0 <= report.shm_free <= report.shm_total


def test_no_directory_for_shared_memory():
    report = Prober(str, lambda: Settings(shm_dir="/no/such"), "").host()
    assert (report.shm_total, report.shm_free, report.token) == (None, None, False)
    assert report.shm_trouble
