"""The progress engine, without peers."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from support.threads import WORLD, world

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire import frames, goodbye
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.goodbye import Goodbye


def test_two_threads_that_poll_at_once_are_woken_by_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reads the eventfd, and the second finds it empty."""
    engine = ProgressEngine(0, 1, 1, eager_limit=1024)
    poller = engine._poller
    poller.wake()
    with engine.lock:
        events = poller.poll(1)
    assert events == [(poller.wakeup_fd, select.EPOLLIN)]
    os.eventfd_read(poller.wakeup_fd)
    monkeypatch.setattr(poller, "poll", lambda timeout: events)
    engine.progress()
    engine.close()


def test_a_thread_that_only_looks_does_not_hide_one_that_sleeps() -> None:
    engine = ProgressEngine(0, 1, 1, eager_limit=1024)
    poller = engine._poller
    looked = threading.Event()

    def look() -> None:
        with engine.lock:
            poller.poll(0)
        looked.set()

    looking = threading.Thread(target=look)
    waking = threading.Thread(target=lambda: looked.wait(10) and poller.wake_sleeper())
    with engine.lock:
        looking.start()
        waking.start()
        events = poller.poll(10)
    assert events == [(poller.wakeup_fd, select.EPOLLIN)]
    looking.join()
    waking.join()
    engine.close()


@pytest.mark.parametrize("ends", [False, True], ids=["full", "ended"])
def test_a_paused_ring_takes_no_processor_time(ends: bool) -> None:
    """Its next frame has no buffer yet; bytes to send find no room, or the peer has ended."""
    with world(2, "segment") as pair:
        ours, theirs = pair.meshes
        part = frames.encode(Opcode.PART, group=WORLD, epoch=1, seq=1000, length=20_000_000)
        with theirs.lock:
            theirs.send(0, [part, bytes(200_000)])
        peer = ours._peers[1]
        ours.wait(lambda: peer.paused, Deadline(10))
        assert peer.paused
        if ends:
            theirs._peers[0].connection.close()
        else:
            with ours.lock:
                while not peer.outgoing:
                    ours.send(1, [bytes(1 << 16)])
        polls = ours.poll_count
        ours.wait(lambda: False, Deadline(0.5))
        assert ours.poll_count - polls < 50


@pytest.fixture
def alone() -> Iterator[tuple[ProgressEngine, list[int]]]:
    """An engine whose only connection is to rank 1 of three, and the ranks that it dials."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    dialled: list[int] = []
    engine = ProgressEngine(0, 1, 3, eager_limit=1024)
    engine.add_connection(1, TcpConnection(ours, "rank 1"))
    engine.dial, engine.on_demand = dialled.append, True
    yield engine, dialled
    engine.close()
    theirs.close()


def test_who_loses_its_last_connection_to_a_silent_host_dials_another_rank(
    alone: tuple[ProgressEngine, list[int]],
) -> None:
    engine, dialled = alone
    engine.lose(1, Goodbye("its host has answered nothing", died=True, silent=True))
    assert not engine.lost_peers, "it is connected"
    engine.lose(1, Goodbye("its host has answered nothing", died=True, silent=True), connected=True)
    assert engine.lost_peers[1].silent
    assert dialled == [2]


def test_a_rank_whose_host_is_silent_is_not_dead_at_those_who_are_told_either(
    alone: tuple[ProgressEngine, list[int]],
) -> None:
    engine, _ = alone
    payload = Goodbye("it answers nothing", died=True, silent=True).encode()
    with engine.lock:
        engine._on_goodbye(1, 2, goodbye.decode(payload))
    assert engine.lost_peers[2] == Goodbye("it answers nothing", died=True, silent=True)
