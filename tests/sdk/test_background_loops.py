"""A background loop goes on after an error in one of its steps, and logs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gateway_requests import Requests
from support.processes import wait_until

from rankmesh._launcher.node_rendezvous import NodeRendezvous
from rankmesh._rendezvous.multicast import MulticastLocator
from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.membership.heartbeats import HeartbeatThread
from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.net.handshake import accept
from rankmesh_agent.progress import wait_graph
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire.hello import Service, hello, preface
from rankmesh_agent.wire.store_frames import NO_STORE_ID
from rankmesh_gateway.http import asgi
from rankmesh_gateway.http.app import create_services
from rankmesh_gateway.http.asgi import GatewayApplication
from rankmesh_gateway.state import registry_file
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.registry_file import RegistryFile


class Step:
    """A step of a loop that raises an exception at its first call.

    Attributes:
        calls: the number of calls.
    """

    def __init__(self, step: Callable[..., Any] = lambda *_: None) -> None:
        self.calls = 0
        self._step = step

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("unexpected")
        return self._step(*arguments, **options)

    def wait(self) -> None:
        wait_until(lambda: self.calls > 1, "the next step")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), 60.0)
        return ours, listener.accept()[0]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [each for each in caplog.get_records("call") if each.levelno >= logging.WARNING]
    assert any("unexpected" in caplog.handler.format(each) for each in found)


def test_heartbeats() -> None:
    step = Step()
    thread = HeartbeatThread(step)
    thread.start()
    thread.wake()
    step.wait()
    thread.stop()


def test_watchdogs() -> None:
    step, watchdog = Step(lambda: None), Watchdog("watchdog", 10.0)
    watchdog.add(step)
    step.wait()
    watchdog.remove(step)


def test_progress_of_asynchronous_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tcp_pair()
    engine = ProgressEngine(0, 1, 2, eager_limit=1024)
    engine.add_connection(1, TcpConnection(ours, "rank 1"))
    step = Step(engine.poll_once)
    monkeypatch.setattr(engine, "poll_once", step)
    with contextlib.closing(theirs), contextlib.closing(engine):
        with engine.lock:
            engine.background.add(wait_graph.GROUP, SimpleNamespace(done=False))  # type: ignore[arg-type]  # a message
        step.wait()


def test_the_store_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StoreServer(Table(), "secret")
    monkeypatch.setattr("rankmesh_agent.store.server.accept", Step(accept))
    with contextlib.closing(server):
        for served in (False, True):
            ours, theirs = tcp_pair()
            with ours:
                server.handle(theirs, ConnectionLimit("test").admit(theirs))
                ours.sendall(preface(Service.STORE) + hello("secret", NO_STORE_ID))
                try:
                    assert bool(ours.recv(1)) is served
                except ConnectionResetError:
                    assert not served


async def scan(registry: Registry, until: Callable[[], object]) -> None:
    """Run a gateway's application until a condition holds."""
    ended = asyncio.Event()
    events = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, Any]:
        event = next(events)
        if event == "lifespan.shutdown":
            await ended.wait()
        return {"type": event}

    async def send(_: object) -> None:
        return

    app = GatewayApplication(create_services(registry), lambda: None)
    running = asyncio.ensure_future(app({"type": "lifespan"}, receive, send))
    await asyncio.to_thread(wait_until, until, "the next scan")
    ended.set()
    await running


def test_the_scan_for_silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    step = Step(registry.poll_timeouts)
    monkeypatch.setattr(registry, "poll_timeouts", step)
    monkeypatch.setattr(asgi, "SCAN_SECONDS", 0.01)
    asyncio.run(scan(registry, lambda: step.calls > 1))


def test_the_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_file, "_PAUSE_SECONDS", 0.01)
    registry = Registry()
    file = RegistryFile(tmp_path / "state")
    step = Step(registry.saved)
    monkeypatch.setattr(registry, "saved", step)
    file.follow(registry)
    wait_until(lambda: step.calls, "the first write")
    registry.join(Requests().join(0))
    step.wait()
    registry.close()
    file.close()


def test_the_launchers_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh._launcher.node_rendezvous.LAUNCHER_SECONDS", 0.01)
    rendezvous = NodeRendezvous.__new__(NodeRendezvous)
    rendezvous._changed, rendezvous._closed = threading.Event(), False
    step = Step()
    monkeypatch.setattr(rendezvous, "_exchange", step)
    thread = threading.Thread(target=rendezvous._send_heartbeats)
    thread.start()
    step.wait()
    rendezvous._closed = True
    thread.join()


def test_multicast_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    locator = MulticastLocator.__new__(MulticastLocator)
    locator._ending, step = threading.Event(), Step(lambda _: locator._ending.set() or [])
    locator._channel = SimpleNamespace(receive=step)  # type: ignore[assignment]
    locator._settings = SimpleNamespace(job="job")  # type: ignore[assignment]
    monkeypatch.setattr(locator, "_announce", lambda _: None)
    locator._answer(SimpleNamespace(has_world=lambda _: True))  # type: ignore[arg-type]
    assert step.calls == 2
