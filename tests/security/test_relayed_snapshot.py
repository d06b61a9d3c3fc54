"""A man in the middle of the connection by which the gateway takes a snapshot of a rank on another host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.relay import TAMPERS, relayed
from support.served_store import ServedStore

from rankmesh_agent.diagnostics import snapshot
from rankmesh_agent.diagnostics.snapshot import SnapshotServer
from rankmesh_agent.http.app import create_store_app
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net import mac_socket
from rankmesh_agent.net.mac_socket import MacSocket
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.snapshot import UPGRADE
from rankmesh_gateway.diagnosis import snapshots
from rankmesh_gateway.diagnosis.snapshots import fetch_snapshot

DOCUMENT = {"job": "job", "stacks": ["a line"] * 10_000}


@pytest.fixture
def ready() -> threading.Event:
    """Set when the agent may send the snapshot."""
    return threading.Event()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, ready: threading.Event) -> Iterator[str]:
    """URL of an agent that sends snapshots."""
    monkeypatch.setattr(mac_socket, "leaves_host", lambda sock: True)

    def take() -> Any:
        assert ready.wait(10)
        return DOCUMENT

    server = SnapshotServer(lambda _: take(), lambda: Credentials("secret", job="train"))
    listener = bind("127.0.0.1", 0, purpose="test")
    running = HttpServer(listener, "agent")
    running.start(lambda: create_store_app(ServedStore(), token="secret"), {UPGRADE: server})
    yield url_of(listener)
    running.close()
    server.close()


def test_snapshots_have_macs_between_hosts(url: str, ready: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.set()
    sockets = []
    original = snapshot.with_macs
    monkeypatch.setattr(snapshot, "with_macs", lambda *made: sockets.append(original(*made)) or sockets[-1])
    assert fetch_snapshot(url, "secret", 10.0) == DOCUMENT
    assert [type(each) for each in sockets] == [MacSocket]


@pytest.mark.parametrize("name", ["changed data", "changed MAC", "injected"])
def test_a_changed_snapshot_is_an_error(
    url: str, ready: threading.Event, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = urlsplit(url)
    original = snapshots.with_macs

    def with_macs(*made: Any) -> Any:
        relay.tamper("to the client", TAMPERS[name])  # the handshake is over, and the client waits for the snapshot
        ready.set()
        return original(*made)

    with relayed(str(target.hostname), int(target.port or 0)) as relay:
        monkeypatch.setattr(snapshots, "with_macs", with_macs)
        with pytest.raises(OSError, match="its MAC is wrong"):
            fetch_snapshot(f"http://127.0.0.1:{relay.port}", "secret", 10.0)
        assert relay.tampered()
