"""The store's binary protocol, client and server: handshake, broken connections, waits, and descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from support.processes import wait_until

from rankmesh_agent.net import pool
from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.sockets import url_of
from rankmesh_agent.net.stream import StreamClosedError, StreamTimeoutError
from rankmesh_agent.store import codec, server
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.client_connection import ClientConnection, Connector
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import Add, Append, Count, Get, MultiSet, QueuePop, QueuePush, Set, Wait
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.credentials import Credentials, for_job
from rankmesh_agent.wire.errors import (
    AuthenticationError,
    DistNetworkError,
    ProtocolError,
    StoreLostError,
)
from rankmesh_agent.wire.hello import (
    HELLO_BYTES,
    WELCOME_BYTES,
    Service,
    Verdict,
    client_script,
    hello,
    new_name,
    preface,
    welcome,
)
from rankmesh_agent.wire.store_frames import (
    HEADER_BYTES,
    NO_STORE_ID,
    UNIX_NAME_BYTES,
    RequestId,
    decode_header,
    decode_unix_name,
)


class Raw:
    """A client of the binary protocol, one step at a time.

    Args:
        url: the server's.
        token: for the handshake; None to stop before that.
        store: id of the store.
    """

    def __init__(self, url: str, token: str | None = "secret", store: bytes = NO_STORE_ID) -> None:
        self.sock = connect(url, 60.0, token or "")
        try:
            if token is None:
                self.sock.sendall(preface(Service.STORE))
            else:
                self.name = new_name()
                greeting = hello(token, store, self.name)
                script = client_script(greeting, AuthenticationError("refused"), UNIX_NAME_BYTES)
                name = Handshake(self.sock, Service.STORE, script, client=True).run(60.0)
                self.unix_socket = decode_unix_name(name)
            self.sock.settimeout(60.0)
        except BaseException:
            self.sock.close()
            raise

    def arrived(self) -> bool:
        """Return whether the peer's kernel has received everything."""
        return int.from_bytes(fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder) == 0

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes."""
        data = b""
        while len(data) < size:
            data += self.sock.recv(size - len(data)) or pytest.fail("the connection has ended")
        return data

    def send(self, command: Command, seq: int = 1, again: RequestId | None = None) -> None:
        """Send a command."""
        self.sock.sendall(codec.encode_command(command, seq, again))

    def result(self, command: Command) -> Any:
        """Return a command's result."""
        data = self.read(HEADER_BYTES)
        return codec.decode_result(command, data + self.read(decode_header(data)[0]))

    def ask(self, command: Command, seq: int = 1, again: RequestId | None = None) -> Any:
        """Send a command and return its result."""
        self.send(command, seq, again)
        return self.result(command)

    def is_closed(self) -> bool:
        """Wait for the next byte or the end of the connection; return whether it is the end."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


@pytest.fixture
def raw(url) -> Iterator[Callable[..., Raw]]:
    """Opens clients that proceed one step at a time."""
    made = []

    def make(*arguments: Any) -> Raw:
        made.append(Raw(url, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.sock.close()


@pytest.fixture(params=["tcp", "unix"])
def medium(request, monkeypatch) -> str:
    if request.param == "tcp":
        monkeypatch.setattr(Connector, "_connect_unix", lambda _: None)
    return request.param


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as found:
        yield found


@pytest.fixture
def waits(table) -> Callable[..., None]:
    """KeyWaits until so many calls wait for a key or a queue."""

    def wait(key: str = "k", count: int = 1) -> None:
        registered = lambda: len(table._watches.get(key, ())) + len(table._pending_pops.get(key, ()))  # noqa: E731
        wait_until(lambda: registered() == count, f"{count} waits for {key}")

    return wait


@pytest.fixture(scope="module")
def running_server(server) -> None:
    """The session's server runs before descriptors are counted."""
    urllib.request.urlopen(f"{server[1]}/livez", timeout=60).close()


@pytest.fixture(autouse=True)
def everything_is_closed(running_server) -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors to be closed", 10)
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-store-fast"]


class TestAConnection:
    def test_it_is_reused_and_of_the_fastest_kind(self, medium, store, store_server):
        for number in range(1, 101):
            assert store.execute(Add("n")) == number
        (line,) = store._pool._all
        assert line.sock.family == (socket.AF_UNIX if medium == "unix" else socket.AF_INET)
        wait_until(lambda: len(store_server._connections) == 1, "the others to be closed")

    def test_large_values(self, medium, store, table, threads, waits):
        large = os.urandom(20 << 20)
        waiting = threads.submit(store.execute, Get("k", 30.0))
        waits()
        Set("k", large).apply(table)
        assert waiting.result(30) == large
        store.execute(MultiSet((("a", large), ("b", b""))))
        assert store.execute(Get("a")) == large

    def test_byte_by_byte(self, raw):
        one = raw()
        for byte in codec.encode_command(Set("key", b"value"), 1):
            one.sock.sendall(bytes([byte]))
        assert one.result(Set("key", b"value")) is None
        assert one.ask(Get("key")) == b"value"

    def test_threads_have_one_each_and_few_stay_idle(self, store, table, threads, store_server, waits):
        waiting = [threads.submit(store.execute, Get("k", 30.0)) for _ in range(40)]
        waits("k", 40)
        store.execute(Set("k", b"v"))
        assert [wait.result(30) for wait in waiting] == [b"v"] * 40
        assert len(store._pool._idle) == len(store._pool._all) <= pool.MAX_IDLE
        wait_until(lambda: len(store_server._connections) <= pool.MAX_IDLE, "the rest to be closed")

    @pytest.mark.parametrize(
        ("data", "size", "pause", "result"),
        [
            (codec.encode_result(1, b"v" * 100), 10, 0.02, b"v" * 100),
            (codec.encode_result(1, b"v" * 100)[:-1], 100, 0.0, StreamTimeoutError),
            (b"", 1, 0.0, StreamTimeoutError),
            (codec.encode_result(2, b""), 100, 0.0, ProtocolError),
            (codec.encode_result(1, b"") * 2, 100, 0.0, ProtocolError),
            (b"\xff" * 24, 100, 0.0, ProtocolError),
        ],
        ids=["in pieces", "stops in the middle", "none", "another request's", "two", "garbage"],
    )
    def test_responses(self, threads, data, size, pause, result):
        ours, theirs = socket.socketpair()

        def answer() -> None:
            theirs.recv(1 << 16)
            for begin in range(0, len(data), size):
                theirs.sendall(data[begin : begin + size])
                time.sleep(pause)

        with theirs, contextlib.closing(ClientConnection(ours)) as line:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 10_000))
            answering = threads.submit(answer)
            if isinstance(result, bytes):
                assert line.call(Get("k"), 10.0) == result
            else:
                with pytest.raises(result):
                    line.call(Get("k"), 0.1 if result is StreamTimeoutError else 10.0)
            answering.result(10)

    def test_closing_ends_calls_in_progress(self, medium, store, table, threads, store_server, waits):
        waiting = threads.submit(store.execute, Get("k", 30.0))
        waits()
        store.close()
        with pytest.raises(DistNetworkError, match="is closed"):
            waiting.result(10)
        wait_until(lambda: not store_server._connections and not table._watches, "the server to learn it")


HELLO = hello("secret", NO_STORE_ID)
WRONG = hello("guess", NO_STORE_ID)


class TestUnauthenticatedClients:
    """The server closes their connections without a message, and serves the others as before."""

    @pytest.fixture(autouse=True)
    def others_are_still_served(self, store, store_server, server) -> Iterator[None]:
        store.execute(Set("k", b"v"))
        yield
        wait_until(lambda: len(store_server._connections) == 1, "the others to be closed")
        assert not server[0].limit.waiting
        assert store.execute(Get("k")) == b"v"

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_BYTES),
            b"\xff" * HELLO_BYTES,
            b"\xff" * (1 << 20),
        ],
        ids=["http", "a long credential", "many bytes"],
    )
    @pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
    def test_a_handshake_that_begins_with(self, raw, data, unix):
        one = raw(None)
        if unix:
            name = "\0" + raw().unix_socket
            one.sock.close()
            one.sock = socket.socket(socket.AF_UNIX)
            one.sock.settimeout(10.0)
            one.sock.connect(name)
        with contextlib.suppress(ConnectionError):
            one.sock.sendall(data)
        assert one.is_closed()

    def test_a_wrong_token(self, raw):
        with pytest.raises(AuthenticationError):
            raw("guess")
        for begin, rest in ((WRONG, b""), (WRONG[:-20], WRONG[-20:])):
            one = raw(None)
            one.sock.sendall(begin)
            one.sock.sendall(rest)
            assert one.read(WELCOME_BYTES) == welcome(Verdict.OTHER_TOKEN)
            assert one.is_closed()

    def test_silence(self, raw, monkeypatch):
        monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.05)
        assert raw(None).is_closed()

    def test_each_step_has_its_time(self, raw, store_server, monkeypatch):
        """The time in which the server's own thread cannot run is not the client's."""
        monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
        one = raw(None)
        held = store_server._on_ready

        def wait_and_go_on(connection: Any) -> None:
            if connection.handshake is not None:
                time.sleep(0.6)
            held(connection)

        monkeypatch.setattr(store_server, "_on_ready", wait_and_go_on)
        one.sock.sendall(HELLO[:HELLO_BYTES])
        wait_until(
            lambda: any(each.handshake.steps == 3 for each in store_server._connections.values() if each.handshake), ""
        )
        one.sock.sendall(HELLO[HELLO_BYTES:])
        assert one.read(WELCOME_BYTES) == welcome()

    def test_the_oldest_makes_room(self, raw, url, threads, two_unauthenticated):
        silent = [raw(None) for _ in range(3)]
        assert silent[0].is_closed()
        with contextlib.ExitStack() as closing:
            clients = [closing.enter_context(contextlib.closing(StoreClient(url, "secret"))) for _ in range(20)]
            calls = [threads.submit(client.execute, Get("k")) for client in clients]
            assert [call.result(60) for call in calls] == [b"v"] * 20

    def test_a_refused_client_tries_again(self, url, store_server, monkeypatch):
        refused = iter([1, 2])
        handle = store_server.handle

        def refuse_two(sock: socket.socket, admission: Admission) -> None:
            if next(refused, 0):
                sock.shutdown(socket.SHUT_RDWR)
            handle(sock, admission)

        monkeypatch.setattr(store_server, "handle", refuse_two)
        with contextlib.closing(StoreClient(url, "secret")) as client:
            assert client.execute(Get("k")) == b"v"
        assert next(refused, 0) == 0

    def test_a_second_request_while_the_first_waits(self, raw, table, waits):
        one = raw()
        one.send(Get("none", 30.0))
        waits("none")
        one.send(Get("none", 30.0))
        assert one.is_closed()
        waits("none", 0)


class TestTokens:
    def test_the_server_has_another_token(self, medium, url):
        began = time.monotonic()
        with (
            contextlib.closing(StoreClient(url, "guess")) as store,
            pytest.raises(
                AuthenticationError, match=f"{url} has another token than this process: RANKMESH_TOKEN"
            ) as caught,
        ):
            store.execute_first(Count(), Deadline(60.0))
        assert time.monotonic() - began < 30
        assert caught.value.address == url

    @pytest.mark.parametrize("impostor", [True, False], ids=["of another token", "a server that ends"])
    def test_a_handshake_that_fails(self, threads, impostor):
        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                if impostor:
                    sock.sendall(welcome(Verdict.OTHER_TOKEN))
                else:
                    listener.close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10.0)
            serving = threads.submit(serve)
            with contextlib.closing(StoreClient(url_of(listener), "secret")) as store:
                with pytest.raises(DistNetworkError) as caught:
                    store.execute(Add("k"))
                serving.result(10)
        assert isinstance(caught.value, AuthenticationError) == impostor
        assert impostor or "cannot be reached" in str(caught.value)


@pytest.mark.slow
class TestWaits:
    def test_a_client_that_has_left_gets_nothing(self, raw, table, waits):
        one = raw()
        one.send(QueuePop("q", 30.0))
        waits("q")
        with table._lock:
            other = raw()
            other.send(Count())
            one.sock.close()  # which the server's thread cannot see yet
            QueuePush("q", b"1").apply(table)
        assert other.result(Count()) == 0
        assert other.ask(QueuePop("q", 30.0)) == b"1"

    @pytest.mark.parametrize("closed", ["server", "table"])
    @pytest.mark.parametrize("command", [Get("k", 30.0), Wait(("k",), 30.0), QueuePop("k", 30.0)], ids=["g", "w", "p"])
    def test_the_server_or_the_store_ends(
        self, store, table, store_server, threads, waits, command, closed, monkeypatch
    ):
        monkeypatch.setattr(pool, "_ACCEPT_SECONDS", 0.2)
        waiting = [threads.submit(store.execute, command) for _ in range(3)]
        waits("k", 3)
        (store_server if closed == "server" else table).close()
        for call in waiting:
            with pytest.raises(DistNetworkError, match="cannot be reached"):
                call.result(10)
        ended = closed == "server"  # which may have other stores, too
        wait_until(lambda: store_server._thread.is_alive() != ended, "the service to end with it")

    def test_a_server_that_does_not_respond(self, store, table):
        store.execute(Count())
        with table._lock, pytest.raises(DistNetworkError, match="cannot be reached: timed out"):
            store.execute(Add("k"), 0.1)
        assert not store._pool._all

    def test_in_turn(self, raw, monkeypatch, threads):
        """31 clients send requests while it is busy, some repeatedly: each is served before any is served twice."""
        clients = [raw() for _ in range(32)]
        busy, free = threading.Event(), threading.Event()
        count = Count.try_execute

        def wait_and_count(self: Count, table: Any) -> Any:
            busy.set()
            assert free.wait(30)
            return count(self, table)

        monkeypatch.setattr(Count, "try_execute", wait_and_count)
        clients[0].send(Count())
        assert busy.wait(30)
        for number, client in enumerate(clients[1:], 1):
            client.send(QueuePush("q", b"%d" % number))
        wait_until(lambda: all(client.arrived() for client in clients), "all requests to reach the server's sockets")
        free.set()
        clients[0].result(Count())

        def go_on(number: int) -> None:
            clients[number].result(QueuePush("q", b""))
            for _ in range(number % 3):
                clients[number].ask(QueuePush("q", b"%d" % number))

        list(threads.map(go_on, range(1, 32)))
        first = [int(clients[0].ask(QueuePop("q"))) for _ in range(31)]
        assert sorted(first) == list(range(1, 32))


class TestBrokenConnections:
    """The server executes a request once, although its client sends it several times."""

    @pytest.fixture(autouse=True)
    def through_the_proxy(self, request, monkeypatch):
        if "losing" in request.fixturenames:
            monkeypatch.setattr(Connector, "_connect_unix", lambda _: None)

    def test_it_is_repeated_once(self, losing, table):
        with (
            losing(times=2) as url,
            contextlib.closing(StoreClient(url, "secret")) as store,
            pytest.raises(DistNetworkError, match="cannot be reached"),
        ):
            store.execute(Add("k"))
        assert table.value("k") == b"1"

    def test_a_repeated_wait_gets_the_rest_of_its_time(self, store, monkeypatch):
        asked = []

        def ask(_, command: Command, timeout: float, request_id: RequestId | None = None) -> Any:
            asked.append(command.seconds)
            if len(asked) == 1:
                time.sleep(0.05)
                raise StreamClosedError
            return b"v"

        monkeypatch.setattr(ClientConnection, "call", ask)
        assert store.execute(Get("k", 30.0), timeout=60.0) == b"v"
        assert asked[0] == 30.0
        assert 0.0 < asked[1] <= 29.95

    def test_a_connection_that_the_server_closed_while_it_was_idle(self, medium, store, store_server):
        assert store.execute(Add("k")) == 1
        for connection in list(store_server._connections.values()):
            connection.shut_down()
        wait_until(lambda: not store_server._connections, "the end")
        assert store.execute(Add("k")) == 2

    @pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
    def test_its_last_response_is_cached(self, raw, closed):
        """Whether the server has noticed the end of the first connection or not."""
        first, second, third = raw(), raw(), raw()
        assert first.ask(Add("k"), 7) == 1
        if closed:
            first.sock.close()
        assert second.ask(Add("k"), 1, RequestId(first.name, 7)) == 1
        assert second.ask(Add("k"), 2) == 2
        if not closed:
            assert first.is_closed()
        assert [third.ask(Add("k"), seq, RequestId(second.name, 2)) for seq in (1, 2)] == [2, 2]
        assert second.is_closed()
        fourth = raw()
        assert fourth.ask(Add("k"), 1, RequestId(third.name, 9)) == 3  # the response is another request's

    @pytest.mark.parametrize("arrived", [False, True], ids=["before the result", "with the result"])
    def test_a_wait_moves(self, raw, table, waits, arrived):
        first, second = raw(), raw()
        first.send(QueuePop("q", 30.0), 3)
        waits("q")
        (taker,) = table._pending_pops["q"]
        if arrived:
            QueuePush("q", b"1").apply(table)
            first.sock.close()
        second.send(QueuePop("q", 30.0), 1, RequestId(first.name, 3))
        if not arrived:
            assert first.is_closed()
            wait_until(lambda: taker.cancelled() and table._pending_pops, "the second wait")
            QueuePush("q", b"1").apply(table)
        assert second.result(QueuePop("q")) == b"1"


class TestALog:
    @pytest.fixture
    def log(self, table) -> Mock:
        """A TableLog; what it is called with, and under which request, is in ``seen``."""
        table.log = found = Mock(request_id=None, seen=[])
        for name in ("changed", "pushed", "popped", "handed_over"):
            note = partial(lambda name, *given, **_: found.seen.append((name, found.request_id, given[-1])), name)
            getattr(found, name).side_effect = note
        return found

    def test_it_knows_the_requests(self, raw, table, log, waits):
        one, two = raw(), raw()
        first, second = (partial(RequestId, each.name) for each in (one, two))
        one.ask(Add("k"), 1)
        one.send(QueuePop("q", 30.0), 2)
        waits("q")
        two.ask(QueuePush("q", b"v"), 5)
        assert one.result(QueuePop("q")) == b"v"
        two.ask(Add("k"), 6, RequestId(b"n" * 64, 9))
        again = RequestId(b"n" * 64, 9)
        assert log.seen == [("changed", first(1), 1), ("handed_over", second(5), first(2)), ("changed", again, 2)]
        assert log.request_id is None


class TestSeveralStores:
    """One server has two jobs' stores."""

    IDS: ClassVar = {job: job.encode() * 16 for job in "ab"}

    @pytest.fixture
    def tables(self) -> dict[bytes, Table]:
        return {store: Table() for store in self.IDS.values()}

    @pytest.fixture
    def store_server(self, tables, server) -> Iterator[StoreServer]:
        def credentials(store: bytes) -> Credentials:
            return Credentials("secret", job=next((job for job in self.IDS if self.IDS[job] == store), ""))

        stores = SimpleNamespace(find=tables.get, credentials=credentials)
        with contextlib.closing(StoreServer(stores, "secret", unix_socket=server[0].unix_socket)) as found:
            yield found

    @pytest.fixture
    def connect(self, url) -> Iterator[Callable[..., StoreClient]]:
        with contextlib.ExitStack() as opened:
            yield lambda token, store: opened.enter_context(contextlib.closing(StoreClient(url, token, store)))

    def test_each_has_its_own_keys_and_credential(self, medium, connect, tables):
        for job, store in self.IDS.items():
            for token in ("secret", for_job("secret", job)):
                connect(token, store).execute(Append("k", job.encode()))
        assert [table.value("k") for table in tables.values()] == [b"aa", b"bb"]
        for store in (self.IDS["b"], NO_STORE_ID, b"c" * 16):
            with pytest.raises(AuthenticationError):
                connect(for_job("secret", "a"), store).execute(Set("k", b"stolen"))
        assert [table.value("k") for table in tables.values()] == [b"aa", b"bb"]

    def test_one_that_is_lost(self, medium, connect, store_server):
        """It is an error of the call: the connection stays."""
        store = connect("secret", b"c" * 16)
        for command in (Get("k", 30.0), Set("k", b"v"), Add("k")) * 2:
            with pytest.raises(StoreLostError, match="started after the job"):
                store.execute(command)
        assert len(store._pool._all) == len(store._pool._idle) == 1
        wait_until(lambda: len(store_server._connections) == 1, "the others to be closed")

    @pytest.mark.parametrize("keyed", [True, False], ids=["an Idempotency-Key", "a connection"])
    def test_the_identity_of_a_request_is_its_stores(self, raw, tables, waits, keyed):
        """Neither the reply nor the wait of another job's request is found under it."""
        ours, theirs = (raw("secret", store) for store in self.IDS.values())
        again = RequestId(b"name" * 16 if keyed else theirs.name, 1, keyed)
        theirs.send(Add("k", 5), 1, again if keyed else None)
        assert theirs.result(Add("k")) == 5
        assert [ours.ask(Add("k", 5), seq, again) for seq in (1, 2)] == [5, 5]
        assert [table.value("k") for table in tables.values()] == [b"5", b"5"]
        assert theirs.ask(Add("k"), 2) == 6


class TestTheServer:
    def test_it_has_no_thread_before_the_first_client_and_none_after_its_end(self, table):
        before = threading.active_count()
        idle = StoreServer(table, "")
        idle.close()
        idle.close()
        ours, theirs = socket.socketpair()
        idle.handle(theirs, ConnectionLimit("test").admit(theirs))
        assert threading.active_count() == before
        with ours:
            assert ours.recv(1) == b""

    def test_without_free_descriptors_it_serves_its_clients(self, raw):
        one = raw()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10.0)
            most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
            try:
                sock.connect("\0" + one.unix_socket)
                for number in range(1, 101):
                    assert one.ask(Add("k")) == number
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, most)
            sock.sendall(preface(Service.STORE) + HELLO)
            assert sock.recv(100) == welcome()

    def test_plain_http_continues_on_the_same_port(self, url, store):
        store.execute(Set("k", b"v"))
        split = urlsplit(url)
        rest = b"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        last = b"GET /v1/no-such-path " + rest + b"Connection: close\r\n\r\n"
        asked = b"GET /v1/store/k " + rest + b"\r\n" + last
        with socket.create_connection((split.hostname, split.port), 60.0) as sock:
            for byte in asked:  # in as many pieces as can be
                sock.sendall(bytes([byte]))
            answers = b""
            while more := sock.recv(1 << 16):
                answers += more
        assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\n\r\nvHTTP/1.1 404 Not Found\r\n" in answers
