"""Strangers at the door, and who answers at an address."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import pytest
from support.connecting import connect, dial, look, meet, recv_exactly, send_all

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.transports import tcp
from rankmesh_agent.transports.tcp import IDENTITY_BYTES, PROPOSAL, TcpTransport, split_address
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, ProtocolError
from rankmesh_agent.wire.hello import HELLO_BYTES, Service, Verdict, hello, preface, welcome


@pytest.fixture
def listener():
    made = TcpTransport("secret").listen("127.0.0.1:0")
    yield made
    made.close()


@contextlib.contextmanager
def stranger(address: str, says: bytes = b""):
    """A bare socket that has reported something."""
    with socket.create_connection(split_address(address), timeout=60) as sock:
        sock.sendall(says)
        yield sock


def check_a_proper_client_gets_in(listener) -> None:
    connecting, accepting = connect(TcpTransport("secret"), listener)
    with contextlib.closing(connecting), contextlib.closing(accepting):
        send_all(connecting, b"hello", Deadline(10))
        assert recv_exactly(accepting, 5, Deadline(10)) == b"hello"


def receive(sock: socket.socket, listener) -> bytes:
    """Receive from the listener, which works meanwhile; return b"" at the end of the connection."""
    sock.settimeout(0.02)
    deadline = Deadline(10)
    while not deadline.expired():
        assert look(listener) == []
        try:
            return sock.recv(1000)
        except ConnectionResetError:
            return b""
        except TimeoutError:
            continue
    raise AssertionError("the connection stays open")


ALERT = b"\x15"
GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost:29500\r\nAccept: */*\r\n\r\n",
    "TLS": preface(Service.MESH) + bytes.fromhex("1603010005") + bytes(5),
    "noise": random.Random(0).randbytes(500),
    "no version": b"RKMH-HX\x03" + bytes(HELLO_BYTES),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_connections_with_garbage_are_closed(listener, data):
    with stranger(listener.address, data) as sock:
        check_a_proper_client_gets_in(listener)
        assert receive(sock, listener)[:1] in (b"", ALERT)


def test_handshakes_that_stop_delay_no_other_and_time_out(listener, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 0.5)
    begun = preface(Service.MESH) + hello("secret")
    with contextlib.ExitStack() as strangers:
        silent = [
            strangers.enter_context(stranger(listener.address, data))
            for data in (b"", b"RKMH", preface(Service.MESH), preface(Service.MESH) + b"\x16\3", begun)
        ]
        check_a_proper_client_gets_in(listener)
        for sock in silent:
            assert receive(sock, listener) == b""


def test_the_oldest_silent_client_makes_room(listener, two_unauthenticated):
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(stranger(listener.address)) for _ in range(6)]
        check_a_proper_client_gets_in(listener)
        for sock in silent[:5]:
            assert receive(sock, listener) == b""


@pytest.mark.parametrize("token", ["wrong", "", "secret2"])
def test_another_token_is_refused_with_a_reason(listener, token):
    with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN must be the same on every rank") as caught:
        dial(TcpTransport(token), listener.address, listener)
    assert caught.value.address == listener.address
    check_a_proper_client_gets_in(listener)
    assert look(listener) == []


@contextlib.contextmanager
def server(answer):
    """Answer the first connection by a function of its socket, in a thread; give the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as sock:
                sock.settimeout(10)
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join()


def web(sock: socket.socket) -> None:
    sock.recv(1000)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def impostor(sock: socket.socket) -> None:
    sock.recv(1000)
    sock.sendall(welcome(Verdict.OTHER_TOKEN))


def mirror(sock: socket.socket) -> None:
    sock.sendall(sock.recv(1000))


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (web, ProtocolError, "does not speak RankMesh"),
        (impostor, AuthenticationError, "RANKMESH_TOKEN"),
        (mirror, AuthenticationError, "RANKMESH_TOKEN"),
        (lambda sock: None, DistNetworkError, "lost"),
        (lambda sock: [sock.recv(1000), sock.recv(1000)], TimeoutError, "connected"),
    ],
    ids=["web", "impostor", "mirror", "closed", "silent"],
)
def test_servers_of_another_kind(answer, error, reason):
    with server(answer) as address, pytest.raises(error, match=reason) as caught:
        dial(TcpTransport("secret"), address, seconds=0.2 if error is TimeoutError else 10)
    assert type(caught.value) is error


def test_a_client_that_is_ready_stays_although_the_next_one_finds_no_descriptor(listener, monkeypatch):
    def exhausted(admits):
        raise DescriptorLimitError("no free descriptor")

    greeting = preface(Service.MESH) + hello("secret", PROPOSAL.pack(0, 0, b"", b"") + bytes(IDENTITY_BYTES))
    with stranger(listener.address, greeting[:10]) as connecting:
        while not listener.busy():
            assert look(listener) == []
        with socket.create_connection(split_address(listener.address)), monkeypatch.context() as limited:
            limited.setattr(listener, "_accept_clients", exhausted)
            connecting.sendall(greeting[10:])
            while listener.busy():
                with contextlib.suppress(DescriptorLimitError):
                    assert look(listener) == [], "the next client did not wait"
        ((_, accepting),) = look(listener)
        accepting.close()


def test_an_end_that_was_reset_has_nothing_to_drain():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = TcpConnection(socket.create_connection(server.getsockname()), "peer")
        server.accept()[0].close()
    with contextlib.closing(connection):
        assert connection.send([b"to a socket that is closed"])
        with pytest.raises(DistNetworkError):
            recv_exactly(connection, 1, Deadline(10))
        for _ in range(2):
            assert connection.drain()


def test_closing_an_end_nobody_reads_does_not_take_for_ever(listener):
    connecting, accepting = connect(TcpTransport("secret"), listener)
    with contextlib.closing(connecting):
        while connecting.send([bytes(1 << 16)]):
            pass
        accepting.close()


def test_who_is_not_known_is_not_asked_who_it_is(listener):
    def never(identity: bytes) -> bool:
        raise AssertionError

    with pytest.raises(AuthenticationError):
        meet([TcpTransport("wrong").dial(listener.address, b"me")], listener, arrivals=0, admits=never)


def test_the_next_address_of_a_name_is_tried(listener, monkeypatch):
    host, port = split_address(listener.address)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in (nobody, (host, port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (connecting,), ((_, accepting),) = meet([TcpTransport("secret").dial(f"name:{port}")], listener)
    connecting.close()
    accepting.close()


def test_ipv6():
    try:
        listener = TcpTransport("secret").listen("[::1]:0")
    except DistNetworkError as error:
        pytest.skip(str(error))
    with contextlib.closing(listener):
        check_a_proper_client_gets_in(listener)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("node5:0", "node5", 0),
        ("[::1]:29500", "::1", 29500),
        ("::1:29500", "::1", 29500),
        ("[fe80::1%eth0]:29500", "fe80::1%eth0", 29500),
    ],
)
def test_host_and_port(address, host, port):
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "node5", "node5:", "node5:http", "node5:-1", "http://node5", "[::1]", "node5:²"]
)
def test_no_host_and_port(address):
    with pytest.raises(ValueError):  # noqa: PT011 (int has words of its own for ²)
        split_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:99999999999", "node..5:80", "n" * 70 + ":80"])
def test_an_address_that_cannot_be_is_an_address_nobody_answers_at(address):
    with pytest.raises(DistNetworkError):
        dial(TcpTransport("secret"), address)
    with pytest.raises(DistNetworkError):
        TcpTransport("secret").listen(address)
