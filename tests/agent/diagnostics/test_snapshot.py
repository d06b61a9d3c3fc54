"""Snapshots of a rank, and their server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rankmesh_agent.diagnostics.snapshot import SnapshotServer
from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.hello import Service, client_script, hello
from rankmesh_agent.wire.snapshot import RankSnapshot

TOKEN = "a secret"
SECONDS = 20.0


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    made = SnapshotServer(lambda _: RankSnapshot("job", 1, 2, attached=False), lambda: Credentials(TOKEN))
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-snapshot"]


def connect(server: SnapshotServer) -> socket.socket:
    """Return a connection to the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        sock = socket.create_connection(listener.getsockname(), SECONDS)
        theirs, _ = listener.accept()
    server.handle(theirs, ConnectionLimit("test").admit(theirs))
    return sock


def ask(server: SnapshotServer, token: str) -> bytes:
    with connect(server) as sock:
        sock.settimeout(SECONDS)
        script = client_script(hello(token), AuthenticationError("no"))
        Handshake(sock, Service.SNAPSHOT, script, client=True).run(SECONDS)
        sock.settimeout(SECONDS)
        return sock.makefile("rb").read()


def test_a_client_with_the_token_gets_the_document(server: SnapshotServer):
    found = json.loads(ask(server, TOKEN))
    assert (found["job"], found["rank"], found["stacks"], found["calls"]) == ("job", 2, [], [])


def test_a_client_with_another_token_gets_none(server: SnapshotServer):
    with pytest.raises((AuthenticationError, OSError)):
        ask(server, "another")


def test_an_agent_without_a_rank():
    server = SnapshotServer(lambda _: None, lambda: Credentials(TOKEN))
    assert ask(server, TOKEN) == b"null"
    server.close()


def test_close_ends_the_connections_of_clients_that_send_nothing(server: SnapshotServer):
    with connect(server) as sock:
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < SECONDS / 4
        sock.settimeout(SECONDS)
        while sock.recv(1000):
            pass
        with connect(server) as late:
            late.settimeout(SECONDS)
            assert late.recv(1) == b""


def test_silent_clients_keep_no_other_out(server: SnapshotServer):
    silent = [connect(server) for _ in range(20)]
    assert json.loads(ask(server, TOKEN))["rank"] == 2
    for sock in silent:
        sock.close()
