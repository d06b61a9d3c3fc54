"""The user of the process at the other end of a connection."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.users import OTHER_USER, as_other_user, as_root

from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.net import peer_credentials
from rankmesh_agent.net.handshake import verdict_on
from rankmesh_agent.net.peer_credentials import PeerRefusedError, check_peer
from rankmesh_agent.wire.hello import Verdict

MAPPED = "::ffff:127.0.0.1"
ENDS = {
    "IPv4": ("127.0.0.1", "127.0.0.1"),
    "IPv6": ("::1", "::1"),
    "mapped client": ("127.0.0.1", MAPPED),
    "mapped server": (MAPPED, "127.0.0.1"),
}


@pytest.fixture(params=ENDS)
def ends(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Addresses of a server, and of the server as the client has it."""
    return ENDS[request.param]


def listen(host: str, port: int = 0) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


@pytest.fixture
def listener(ends: tuple[str, str]) -> Iterator[socket.socket]:
    with listen(ends[0]) as sock:
        yield sock


def connect(listener: socket.socket, host: str) -> socket.socket:
    return socket.create_connection((host, listener.getsockname()[1]), 10)


def test_a_process_of_the_same_user(listener: socket.socket, ends: tuple[str, str]):
    with connect(listener, ends[1]), listener.accept()[0] as accepted:
        check_peer(accepted)


def test_a_client_that_has_gone_is_not_warned_of(
    listener: socket.socket, ends: tuple[str, str], caplog: pytest.LogCaptureFixture
):
    connect(listener, ends[1]).close()
    with listener.accept()[0] as accepted:
        assert verdict_on(accepted, "", TlsSettings()) is Verdict.OTHER_USER
    assert not caplog.records


@as_root
def test_a_process_of_another_user(listener: socket.socket, ends: tuple[str, str]):
    def check() -> None:
        with listener.accept()[0] as accepted:
            check_peer(accepted)

    def wait_for_end() -> bytes:
        with connect(listener, ends[1]) as sock:
            return sock.recv(1)

    with ThreadPoolExecutor(1) as thread:
        checked = thread.submit(check)
        assert as_other_user(lambda: wait_for_end().decode()) == ""
        with pytest.raises(PeerRefusedError, match=f"of user {OTHER_USER}, this one of user 0; .*Set RANKMESH_TOKEN"):
            checked.result()


@as_root
def test_a_process_that_has_closed_the_connection(listener: socket.socket, ends: tuple[str, str]):
    assert as_other_user(lambda: connect(listener, ends[1]).close()) is None
    with listener.accept()[0] as accepted, pytest.raises(PeerRefusedError, match="the client has closed"):
        check_peer(accepted)


def test_a_connection_that_is_closed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    """Else a busy server would look for clients without patience, and serve no other one."""
    looks = []
    monkeypatch.setattr(peer_credentials, "_look_up_in", lambda path, *_: looks.append(path) or iter(()))
    with listen("127.0.0.1") as listener:
        client = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as accepted:
            with pytest.raises(PeerRefusedError, match="no process of this host has the connection"):
                check_peer(accepted)
            assert len(looks) == 2 * peer_credentials._LOOKS
            looks.clear()
            client.close()
            with pytest.raises(PeerRefusedError, match="the client has closed"):
                check_peer(accepted)
            assert len(looks) == 2


def test_connections_share_a_reading_that_is_younger_than_they():
    with listen("127.0.0.1") as listener, contextlib.ExitStack() as stack:
        accepted = []
        for _ in range(3):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted.append(stack.enter_context(listener.accept()[0]))
        since, readings = time.monotonic(), set()
        for sock in accepted:
            check_peer(sock, since)
            readings.add(peer_credentials._tables["/proc/net/tcp", False][0])
        assert len(readings) == 1
        stack.enter_context(socket.create_connection(listener.getsockname()))
        check_peer(stack.enter_context(listener.accept()[0]), time.monotonic())
        assert peer_credentials._tables["/proc/net/tcp", False][0] > max(readings)


def test_a_socket_that_listens_at_the_peers_address():
    with listen("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        for far, owners in ((b"\x7f\0\0\1", 1), []), ((bytes(4), 0), [os.geteuid()]):
            assert [*peer_credentials._users((b"\x7f\0\0\1", port), far, time.monotonic())] == owners


def test_a_kernel_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError("it is not permitted")

    monkeypatch.setattr(peer_credentials, "_look_up_in", refuse)
    with (
        listen("127.0.0.1") as listener,
        connect(listener, "127.0.0.1") as client,
        pytest.raises(PeerRefusedError, match=r"cannot determine the user .*not permitted.*Set RANKMESH_TOKEN"),
    ):
        check_peer(client)


@as_root
def test_a_unix_socket(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("\0" + str(tmp_path))
        listener.listen()
        client.connect("\0" + str(tmp_path))
        with listener.accept()[0] as accepted:
            check_peer(accepted)

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + str(tmp_path))

        assert as_other_user(connect) is None
        with listener.accept()[0] as accepted, pytest.raises(PeerRefusedError, match=f"of user {OTHER_USER}"):
            check_peer(accepted)


def test_a_user_that_stands_for_all_unmapped_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    monkeypatch.setattr(peer_credentials, "_owner", lambda *_: OTHER_USER)
    with listen("127.0.0.1") as listener, connect(listener, "127.0.0.1") as client:
        monkeypatch.setattr(peer_credentials, "_unmapped_uid", lambda: None)
        check_peer(client)
        monkeypatch.setattr(peer_credentials, "_unmapped_uid", lambda: OTHER_USER)
        with pytest.raises(PeerRefusedError, match="user namespace"):
            check_peer(client)
