"""The progress engine, without peers."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from rankmesh_agent.progress import engine as engine_module
from rankmesh_agent.progress.engine import Disconnect, ProgressEngine
from rankmesh_agent.transports.tcp import TcpConnection
from rankmesh_agent.wire import goodbye


def test_two_threads_that_poll_at_once_are_woken_by_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reads the eventfd, and the second finds it empty."""
    engine = ProgressEngine(0, 1, {}, eager_limit=1024)
    poller = engine._poller
    poller.wake()
    with engine.lock:
        events = poller.poll(1)
    assert events == [(poller.wakeup_fd, select.EPOLLIN)]
    os.eventfd_read(poller.wakeup_fd)
    monkeypatch.setattr(poller, "poll", lambda timeout: events)
    engine.progress()
    engine.close()


@pytest.fixture
def alone() -> Iterator[tuple[ProgressEngine, list[int]]]:
    """An engine whose only connection is to rank 1 of three, and the ranks that it dials."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    dialled: list[int] = []
    engine = ProgressEngine(
        0, 1, {1: TcpConnection(ours, "rank 1")}, eager_limit=1024, dial=dialled.append, world_size=3
    )
    yield engine, dialled
    engine.close()
    theirs.close()


def test_who_loses_its_last_connection_to_a_silent_host_dials_another_rank(
    alone: tuple[ProgressEngine, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, dialled = alone
    monkeypatch.setattr(TcpConnection, "silent_seconds", lambda self: 1e9)
    monkeypatch.setattr(engine_module, "SILENT_SECONDS", 0.0)
    engine.fail_silent_hosts()
    assert engine.lost_peers[1].silent
    assert dialled == [2]


def test_a_rank_whose_host_is_silent_is_not_dead_at_those_who_are_told_either(
    alone: tuple[ProgressEngine, list[int]],
) -> None:
    engine, _ = alone
    part, payload = Disconnect("it answers nothing", clean=False, silent=True).goodbye().encode()
    with engine.lock:
        engine._on_goodbye(1, 2, goodbye.decode(part, payload))
    assert engine.lost_peers[2] == Disconnect("it answers nothing", clean=False, silent=True)
