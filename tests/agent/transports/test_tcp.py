"""Strangers at the door, and who answers at an address."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import pytest
from support.connecting import connect, dial, look, meet, recv_exactly, send_all

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.transports import tcp
from rankmesh_agent.transports.tcp import TcpTransport, split_address
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, ProtocolError
from rankmesh_agent.wire.handshake import Challenge


@pytest.fixture
def listener():
    made = TcpTransport("secret").listen("127.0.0.1:0")
    yield made
    made.close()


@contextlib.contextmanager
def stranger(address: str, says: bytes = b""):
    """A bare socket that has said something."""
    with socket.create_connection(split_address(address), timeout=60) as sock:
        sock.sendall(says)
        yield sock


def check_a_proper_client_gets_in(listener) -> None:
    connecting, accepting = connect(TcpTransport("secret"), listener)
    with contextlib.closing(connecting), contextlib.closing(accepting):
        send_all(connecting, b"hello", Deadline(10))
        assert recv_exactly(accepting, 5, Deadline(10)) == b"hello"


def said_to(sock: socket.socket, listener) -> bytes:
    """Return what a stranger hears next, b"" where that is the end, while the listener does its work."""
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
    raise AssertionError("it is not hung up on")


def is_closed_without_a_word(sock: socket.socket, listener) -> bool:
    return said_to(sock, listener) == b""


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost:29500\r\nAccept: */*\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(100),
    "noise": random.Random(0).randbytes(500),
    "another version": b"RKMH-HI\x02" + bytes(32),
}


@pytest.mark.parametrize("says", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_hung_up_on_and_hinders_nobody(listener, says):
    with stranger(listener.address, says) as sock:
        check_a_proper_client_gets_in(listener)
        assert is_closed_without_a_word(sock, listener)


@pytest.mark.parametrize("says", [b"", b"RKMH", Challenge("", client=True).hello()], ids=["nothing", "little", "hello"])
def test_the_silent_hinder_nobody_and_are_hung_up_on(listener, says, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 1.0)
    with contextlib.ExitStack() as strangers:
        socks = [strangers.enter_context(stranger(listener.address, says)) for _ in range(5)]
        check_a_proper_client_gets_in(listener)
        for sock in socks:
            if says.startswith(b"RKMH-HI"):
                assert len(said_to(sock, listener)) == 40, "its hello, which is no secret"
            assert is_closed_without_a_word(sock, listener)


def test_who_proves_itself_but_then_says_nothing_is_hung_up_on(listener, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_SECONDS", 1.0)
    challenge = Challenge("secret", client=True)
    with stranger(listener.address, challenge.hello()) as sock:
        challenge.receive_hello(said_to(sock, listener))
        sock.sendall(challenge.proof())
        check_a_proper_client_gets_in(listener)
        assert is_closed_without_a_word(sock, listener)
    assert look(listener) == []


def test_too_many_strangers_are_closed_unheard(monkeypatch):
    monkeypatch.setattr(tcp, "MAX_HANDSHAKES", 2)
    listener = TcpTransport("secret").listen("127.0.0.1:0")
    with contextlib.closing(listener), contextlib.ExitStack() as strangers:
        first, second, third = (strangers.enter_context(stranger(listener.address)) for _ in range(3))
        assert is_closed_without_a_word(third, listener)
        first.close()
        second.close()
        deadline = Deadline(10)
        while True:  # as soon as their places are free again
            try:
                check_a_proper_client_gets_in(listener)
                break
            except DistNetworkError:
                assert not deadline.expired()


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


def test_a_server_of_another_kind_is_noticed():
    def web(sock):
        sock.recv(1000)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with server(web) as address, pytest.raises(ProtocolError, match="does not speak RankMesh"):
        dial(TcpTransport("secret"), address)


def test_a_server_that_does_not_know_the_token_is_not_believed():
    def impostor(sock):
        challenge = Challenge("guess", client=False)
        challenge.receive_hello(sock.recv(40))
        sock.sendall(challenge.hello())
        sock.recv(32)
        sock.sendall(challenge.proof())

    with server(impostor) as address, pytest.raises(AuthenticationError):
        dial(TcpTransport("secret"), address)


def test_a_mirror_is_not_believed():
    def mirror(sock):
        sock.sendall(sock.recv(40))
        sock.sendall(sock.recv(32))

    with server(mirror) as address, pytest.raises(AuthenticationError):
        dial(TcpTransport("secret"), address)


def test_a_server_that_hangs_up_at_once_is_no_question_of_tokens():
    with server(lambda sock: None) as address, pytest.raises(DistNetworkError, match="lost") as caught:
        dial(TcpTransport("secret"), address)
    assert not isinstance(caught.value, AuthenticationError)


def test_a_silent_server_is_given_up_in_time():
    with server(lambda sock: [sock.recv(1000), sock.recv(1000)]) as address, pytest.raises(TimeoutError):
        dial(TcpTransport("secret"), address, seconds=0.2)


def test_closing_an_end_nobody_reads_does_not_take_for_ever(listener):
    connecting, accepting = connect(TcpTransport("secret"), listener)
    with contextlib.closing(connecting):
        while connecting.send([bytes(1 << 16)]):
            pass
        accepting.close()


def test_all_of_a_crowd_get_in_together(listener):
    transport = TcpTransport("secret")
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(stranger(listener.address))
        made, arrived = meet([transport.dial(listener.address, bytes([number])) for number in range(50)], listener)
        assert sorted(identity[0] for identity, _ in arrived) == list(range(50))
        by_identity = {identity[0]: connection for identity, connection in arrived}
        for number, connection in enumerate(made):
            send_all(connection, bytes([number]), Deadline(10))
            assert recv_exactly(by_identity[number], 1, Deadline(10)) == bytes([number])
        for connection in [*made, *by_identity.values()]:
            connection.close()


def test_who_is_not_waited_for_is_told_so(listener):
    with pytest.raises(DistNetworkError, match="does not wait for this rank") as caught:
        meet([TcpTransport("secret").dial(listener.address)], listener, arrivals=0, admits=lambda identity: False)
    assert not isinstance(caught.value, AuthenticationError)


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
