"""Who is gone without a goodbye, known while nobody calls. Ranks as threads; one dies when its sockets do."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.processes import wait_until
from support.threads import LATER, NOW, WORLD, World, world

from rankmesh_agent.progress import disconnects
from rankmesh_agent.progress.disconnects import DisconnectMonitor
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import Opcode

TIMEOUT = 20.0


@pytest.fixture(params=["tcp", "segment"])
def trio(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(3, request.param) as made:
        yield made


@pytest.fixture
def monitor(trio: World) -> Iterator[DisconnectMonitor]:
    """Rank 0's."""
    made = DisconnectMonitor(trio.meshes[0])
    yield made
    made.close()


def die(made: World, rank: int, towards: int = 0) -> None:
    """End a rank's connection as the kernel does when its process ends."""
    fd = next(fd for fd, peer in made.meshes[rank].descriptors().items() if peer == towards)
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def readable(monitor: DisconnectMonitor, seconds: float = TIMEOUT) -> bool:
    return bool(select.select([monitor.fileno()], [], [], seconds)[0])


def until_news(monitor: DisconnectMonitor) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not monitor.poll():
        assert time.monotonic() < deadline, "it never noticed"
        time.sleep(min(0.01, monitor.next_check()))


def test_while_all_are_there_nothing_wakes_it(trio, monitor):
    trio.run(lambda members: members.barrier(NOW))
    assert not readable(monitor, 0.05)
    assert not monitor.poll()
    assert monitor.next_check() == float("inf")
    assert monitor.failed_peers() == []


def test_a_peer_that_dies_and_another_one_later(trio, monitor):
    die(trio, 1)
    assert readable(monitor)
    until_news(monitor)
    (lost,) = monitor.failed_peers()
    assert lost.rank == 1
    # The second cause is reported if the engine has not read the end of the connection within _UNREAD_SECONDS.
    assert "closed by the other side" in lost.cause or "have not been read yet" in lost.cause
    assert not monitor.poll(), "the failure has been reported"
    assert not readable(monitor, 0.05)
    assert [each.rank for each in monitor.failed_peers()] == [1], "each call returns all failed peers"
    die(trio, 2)
    assert readable(monitor)
    until_news(monitor)
    assert [each.rank for each in monitor.failed_peers()] == [1, 2]


def test_the_mesh_tells_what_it_finds_itself(trio, monitor):
    called: list[None] = []
    trio.meshes[0].on_peer_failure = lambda: called.append(None)
    die(trio, 1)
    wait_until(lambda: trio.meshes[0].progress() or 1 in trio.meshes[0].lost_peers, "the loss")
    assert called == [None]
    assert monitor.poll()
    assert [each.rank for each in monitor.failed_peers()] == [1]


def test_one_that_leaves_in_order_is_not_lost(trio, monitor):
    told: list[None] = []
    trio.meshes[0].on_peer_failure = lambda: told.append(None)
    trio.meshes[1].close("it was done")
    assert readable(monitor)
    assert not monitor.poll()
    assert monitor.next_check() == float("inf")
    assert monitor.failed_peers() == []
    assert not told


def test_one_whose_end_comes_just_after_the_last_read_of_another_thread(monkeypatch, trio, monitor):
    monkeypatch.setattr(disconnects, "_UNREAD_SECONDS", TIMEOUT)
    die(trio, 1)
    assert readable(monitor)
    trio.meshes[0].driven = True
    assert not monitor.poll()
    trio.meshes[0].driven = False
    assert monitor.next_check() < 1
    until_news(monitor)
    assert 1 in trio.meshes[0].lost_peers


def test_one_whose_end_comes_behind_other_bytes(monkeypatch, trio, monitor):
    """One read of the engine's gets the bytes, the next one the end."""
    monkeypatch.setattr(disconnects, "_UNREAD_SECONDS", TIMEOUT)
    trio.communicators[1].broadcast(np.ones(1 << 16), 1, LATER)
    trio.meshes[1].flush(0.2)
    time.sleep(0.05)
    die(trio, 1)
    until_news(monitor)
    assert 1 in trio.meshes[0].lost_peers


def test_one_whose_last_words_nobody_reads_yet(monkeypatch):
    """Its message waits for a call that is not made: behind it there may be a goodbye, but hardly for so long."""
    monkeypatch.setattr(disconnects, "_UNREAD_SECONDS", 0.2)
    with world(2, "tcp") as made:
        monitor = DisconnectMonitor(made.meshes[0])
        try:
            header = frames.encode(Opcode.PART, epoch=made.meshes[1].epoch, group=WORLD, seq=7, length=8)
            with made.meshes[1].lock:
                made.meshes[1].send(0, [header, bytes(8)])
            time.sleep(0.05)
            die(made, 1)
            assert readable(monitor)
            assert not monitor.poll()
            assert monitor.next_check() <= 0.2
            until_news(monitor)
            (lost,) = monitor.failed_peers()
            assert lost.rank == 1
            assert "have not been read yet" in lost.cause
            assert monitor.next_check() == float("inf")
        finally:
            monitor.close()
