"""torch's store at a gateway: who is served, and hostile clients, whose commands end their own connections alone."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from support.certificates import in_environment, tls_of
from support.hostile import fuzzed, memory_within, sequences_like
from support.torch_port import SECONDS, Client, request, served
from support.users import as_other_user, as_root

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net import peer_credentials
from rankmesh_agent.net.peer_credentials import PeerNotLocalError, PeerRefusedError
from rankmesh_gateway import torch_store
from rankmesh_gateway.torch_store import PREFACE

MEMORY = 128 << 20
"""Bytes that hostile clients make the gateway allocate, at most; the web framework included."""
CORPUS = [
    request("set", "k", b"value"),
    request("compare_set", "k", b"value", b"new"),
    request("get", "k"),
    request("add", "n", 5),
    request("check", ["k", "n"]),
    request("wait", ["k", "missing"]),
    request("num_keys"),
    request("delete", "k"),
    request("append", "k", b"more"),
    request("multi_get", ["k", "n"]),
    request("multi_set", [("k", b"1"), ("l", b"2")]),
    request("cancel_wait"),
    request("ping")[:1] + struct.pack("<I", 7),
    request("push", "q", b"value"),
    request("pop", "q"),
    request("length", "q"),
    request("list_keys"),
    request("barrier", "b", 2),
]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log; a warning that is given once a minute is due."""
    monkeypatch.setattr(peer_credentials._warning, "_next", 0.0)
    caplog.set_level(logging.WARNING)
    return caplog


def refused(port: int) -> bool:
    """Return whether a client gets its PING back, and then no result."""
    with Client(port) as client:
        assert client.ping() == struct.pack("<I", 1234), "torch's client connects again without it"
        client.send("num_keys")
        return client.read(8) == b""


@pytest.mark.parametrize(
    ("private", "error", "served_"),
    [
        (False, PeerRefusedError("another user; set a token"), False),
        (True, PeerRefusedError("another user; set a token"), False),
        (False, PeerNotLocalError("another host; set a token"), False),
        (True, PeerNotLocalError("another host; set a token"), True),
    ],
)
def test_processes_of_other_users_and_of_other_hosts_are_refused(log, monkeypatch, private, error, served_):
    def check_peer(_: socket.socket) -> None:
        raise error

    monkeypatch.setattr(torch_store, "check_peer", check_peer)
    with served(Settings(private_network=private)) as at:
        assert refused(at.port) != served_
    reason = f"{error.message.partition(';')[0]}. torch's protocol has no authentication"
    assert (reason in log.text and "RANKMESH_PRIVATE_NETWORK=1" in log.text) != served_


@as_root
def test_another_user_is_cut_off_torchs_store() -> None:
    with served(Settings(private_network=True)) as at:
        assert as_other_user(lambda: refused(at.port))
        assert not refused(at.port)


def test_a_gateway_of_several_jobs_serves_no_client_of_torchs_store(log):
    with served(closed="it has several jobs") as at:
        assert refused(at.port)
    assert "TCPStore: it has several jobs" in log.text


def test_torchs_store_needs_no_tls_on_the_host_and_http_does(tmp_path: Path):
    with in_environment(tls_of(tmp_path)), served() as at, Client(at.port) as client:
        assert at.server._tls.cert
        assert client.number("add", "n", 1) == 1
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", at.port)) as sock:
            sock.settimeout(SECONDS)
            sock.sendall(b"\0GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not sock.recv(64).startswith(b"HTTP/1.1 200")


def test_mutated_commands_end_their_connection(caplog: pytest.LogCaptureFixture) -> None:
    with served(Settings(store_keys=1000, store_bytes=1 << 20)) as at, Client(at.port) as witness:
        witness.send("set", "witness", "v")
        assert witness.number("num_keys") == 1

        @fuzzed
        @given(sequences_like(CORPUS))
        def run(sequences: list[list[bytes]]) -> None:
            for sent in sequences:
                with Client(at.port) as client:
                    for command in sent:
                        try:
                            client.sock.sendall(command)
                        except ConnectionError:
                            break
                        while select.select([client.sock], [], [], 0)[0] and client.read(1):
                            pass

        with memory_within(MEMORY), caplog.at_level(logging.ERROR):
            run()
            assert witness.byte("check", ["witness"]) == b"\0"
        assert not caplog.records, caplog.text


def test_announced_sizes_take_no_memory() -> None:
    largest = struct.pack("<Q", 64 << 20)
    commands = (
        b"\1" + struct.pack("<Qc", 1, b"k") + largest,
        b"\x0a" + struct.pack("<Q", 1 << 16),
        b"\x06" + struct.pack("<Q", 1 << 16),
    )
    with served() as at, Client(at.port) as witness:
        assert witness.number("num_keys") == 0
        with memory_within(MEMORY):
            clients = [Client(at.port) for _ in range(20) for _ in commands]
            for number, client in enumerate(clients):
                client.sock.sendall(commands[number % len(commands)])
            assert witness.number("num_keys") == 0
            for client in clients:
                client.sock.close()


@pytest.mark.parametrize("first", [PREFACE[:3], PREFACE[:4] + b"\xff", b"\0" * 5, b"\0" * 200])
def test_other_first_bytes_are_not_torchs(first: bytes) -> None:
    with served() as at, socket.create_connection(("127.0.0.1", at.port), SECONDS) as sock:
        sock.sendall(first)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
        assert received[:12] in (b"", b"HTTP/1.1 400")
