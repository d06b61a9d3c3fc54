"""Sockets with TLS behave as sockets do, and settings that cannot work raise errors that name the variable."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from support.certificates import in_environment, required, tls_of

from rankmesh_agent.config.tls import TlsSettings, tls_settings
from rankmesh_agent.net import tls
from rankmesh_agent.net.tls_socket import TlsSocket, buffered

DATA = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def ends(folder):
    """A client's and a server's end, which block."""
    with in_environment(tls_of(folder)), socket.create_server(("127.0.0.1", 0)) as listener:
        client = tls.client_side(socket.create_connection(listener.getsockname()), "localhost", 1)
        server = tls.server_side(listener.accept()[0], "client", "", tls_settings())
        thread = threading.Thread(target=server.handshake)
        thread.start()
        client.handshake()
        thread.join(30)
        assert not thread.is_alive()
        with client, server:
            client.settimeout(10)
            server.settimeout(10)
            yield client, server


def take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = sock.recv(count - len(data))
        assert received
        data += received
    return data


def test_bytes_arrive_in_order_whatever_the_buffers(ends):
    client, server = ends
    buffers = [DATA[:10], memoryview(DATA)[10:20], b"", DATA[20:70_000], DATA[70_000:70_001]]
    assert client.sendmsg(buffers) == 70_001
    assert take(server, 70_001) == DATA[:70_001]
    thread = threading.Thread(target=server.sendall, args=(DATA,))
    thread.start()
    assert take(client, len(DATA)) == DATA
    thread.join(30)
    assert not thread.is_alive()


def test_what_is_reported_has_left(ends):
    """So that nothing of it is lost if the connection is closed; the rest is what the next call begins with."""
    client, server = ends
    client.setblocking(False)
    sent, endless = 0, DATA * 64
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += client.send(memoryview(endless)[sent:])
    assert client.wants_to_write()
    assert client.committed() > 0
    assert take(server, sent) == endless[:sent]
    sent += client.send(memoryview(endless)[sent : sent + client.committed()])
    assert client.committed() == 0
    client.close()


def test_a_receive_that_is_not_full_leaves_nothing_buffered(ends):
    client, server = ends
    client.sendall(DATA[:100])
    assert server.recv(10) == DATA[:10]
    assert buffered(server), "the rest of the record is decrypted, and the descriptor not readable"
    assert server.recv(1000) == DATA[10:100]
    assert not buffered(server)


def test_flags(ends):
    client, server = ends
    server.setblocking(True)
    with pytest.raises(BlockingIOError):
        server.recv(1, socket.MSG_DONTWAIT)
    client.sendall(b"first")
    assert server.recv(2) == b"fi"
    client.sendall(b"second")
    whole = bytearray(9)
    assert server.recv_into(whole, 0, socket.MSG_WAITALL) == 9
    assert whole == b"rstsecond"


def test_the_end_of_the_connection_is_the_end_of_the_data(ends):
    client, server = ends
    client.sendall(b"last")
    client.close()
    assert server.recv(100) == b"last"
    assert server.recv(100) == b""


def test_a_changed_record_ends_the_connection(ends):
    client, server = ends
    record = bytearray(tls_record(client, b"data"))
    record[-1] ^= 1
    socket.socket.sendall(client, record)
    with pytest.raises(OSError, match="a record was changed on its way"):
        server.recv(100)


def tls_record(sock: TlsSocket, data: bytes) -> bytes:
    sock._write(memoryview(data))
    return sock._outgoing.read()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"RANKMESH_TLS_CERT": "/nowhere"}, "RANKMESH_TLS_CERT: cannot read /nowhere: No such file"),
        ({"RANKMESH_TLS_KEY": "/nowhere"}, "RANKMESH_TLS_KEY: cannot read /nowhere: No such file"),
        ({"RANKMESH_TLS_CA": "/nowhere"}, "RANKMESH_TLS_CA: there is no file /nowhere"),
        ({"RANKMESH_TLS_CA": "/dev/null"}, "RANKMESH_TLS_CA: /dev/null has no certificate"),
        ({"RANKMESH_TLS_CERT": "/dev/null"}, "/dev/null or RANKMESH_TLS_KEY .* is not PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder, changes, error):
    with in_environment(tls_of(folder) | changes), pytest.raises(ValueError, match=error):
        tls.server_context(tls_settings())


def test_a_key_of_another_certificate_is_named(folder):
    of_another = {"RANKMESH_TLS_KEY": tls_of(folder, "there")["RANKMESH_TLS_KEY"]}
    error = r"the key in RANKMESH_TLS_KEY .* does not belong to"
    with in_environment(tls_of(folder) | of_another), pytest.raises(ValueError, match=error):
        tls.server_context(tls_settings())


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"RANKMESH_TLS_CERT": "c"}, "RANKMESH_TLS_CERT is set, but RANKMESH_TLS_KEY is not"),
        ({"RANKMESH_TLS_KEY": "k"}, "RANKMESH_TLS_KEY is set, but RANKMESH_TLS_CERT is not"),
        ({"RANKMESH_TLS": "yes"}, "RANKMESH_TLS='yes': set it to 'require', or leave it out"),
    ],
)
def test_settings_that_contradict_one_another(variables, error):
    with pytest.raises(ValueError, match=error):
        TlsSettings.from_env(variables)


class Attempt(socket.socket):
    """A socket that is about to connect from an address."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self._own = own

    def getsockname(self):
        return self._own, 1


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize(
    ("own", "peer", "trusted", "private", "by_token", "by_files"),
    [
        ("127.0.0.1", "127.0.0.2", True, False, False, False),
        ("127.0.0.1", "127.0.0.2", False, False, True, True),
        ("10.0.0.5", "10.0.0.5", True, False, False, False),
        ("10.0.0.5", "10.0.0.6", True, False, True, True),
        ("10.0.0.5", "10.0.0.6", True, True, False, True),
    ],
)
def test_which_connections_have_tls(folder, monkeypatch, own, peer, trusted, private, by_token, by_files, files):
    monkeypatch.setattr(tls, "is_trusted_listener", lambda host, port: trusted)
    variables = (tls_of(folder) if files else {}) | ({"RANKMESH_PRIVATE_NETWORK": "1"} if private else {})
    with in_environment(variables), Attempt(own) as sock:
        found = tls.secured(sock, "there", (peer, 80), "secret")
        assert isinstance(found, TlsSocket) is (by_files if files else by_token)
        found.close()
    with in_environment({}), Attempt(own) as sock:
        assert tls.secured(sock, "there", (peer, 80), "") is sock
    with in_environment(required(folder)), Attempt(own) as sock:
        found = tls.secured(sock, "there", (peer, 80), "")
        assert isinstance(found, TlsSocket)
        found.close()


def test_a_connection_that_is_passed_on_has_tls(monkeypatch):
    """Of a container's published port, say: the server has refused the first one."""
    monkeypatch.setattr(tls, "is_trusted_listener", lambda host, port: True)
    monkeypatch.setattr(tls, "_forwarded", set())
    tls.require_at(("127.0.0.1", 80))
    for port, expected in ((80, True), (81, False)):
        with Attempt("127.0.0.1") as sock, tls.secured(sock, "127.0.0.1", ("127.0.0.1", port), "secret") as found:
            assert isinstance(found, TlsSocket) is expected
