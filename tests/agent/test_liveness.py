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

from rankmesh_agent import liveness
from rankmesh_agent.collectives.link import CHUNK_BYTES
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.liveness import Liveness
from rankmesh_agent.progress import engine, progress_thread
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistBackendError, DistError, RankFailedError
from rankmesh_agent.wire.frames import Opcode

TIMEOUT = 20.0


@pytest.fixture(params=["tcp", "segment"])
def trio(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(3, request.param) as made:
        yield made


class Store:
    """In place of the job's store: the failures that end its waits, and whether they are for good."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, bool]] = []
        self.times: list[float | None] = []

    def waits_under_way(self) -> bool:
        return False

    def fail_waits(self, failure: DistError, at: float | None = None, *, for_good: bool = False) -> None:
        self.failures.append((failure.message, for_good))
        self.times.append(at)


def watch(made: World) -> Liveness:
    """Return rank 0's."""
    return Liveness(made.meshes[0], Store(), made.communicators[0])  # type: ignore[arg-type]


@pytest.fixture
def monitor(trio: World) -> Liveness:
    """Rank 0's."""
    return watch(trio)


def die(made: World, rank: int, towards: int = 0) -> None:
    """End a rank's connection as the kernel does when its process ends."""
    connection = made.meshes[rank]._peers[towards].connection
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def readable(monitor: Liveness, seconds: float = TIMEOUT) -> bool:
    return bool(select.select([monitor.fileno()], [], [], seconds)[0])


def until_news(monitor: Liveness) -> None:
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
    monkeypatch.setattr(liveness, "_UNREAD_SECONDS", TIMEOUT)
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
    monkeypatch.setattr(liveness, "_UNREAD_SECONDS", TIMEOUT)
    trio.communicators[1].broadcast(np.ones(1 << 16), 1, LATER)
    trio.meshes[1].flush(0.2)
    time.sleep(0.05)
    die(trio, 1)
    until_news(monitor)
    assert 1 in trio.meshes[0].lost_peers


def test_one_whose_last_words_nobody_reads_yet(monkeypatch):
    """Its message waits for a call that is not made: behind it there may be a goodbye, but hardly for so long."""
    monkeypatch.setattr(liveness, "_UNREAD_SECONDS", 0.2)
    with world(2, "tcp") as made:
        monitor = watch(made)
        payload = bytes(CHUNK_BYTES)
        header = frames.encode(Opcode.PART, epoch=made.meshes[1].epoch, group=WORLD, seq=7, length=17 * CHUNK_BYTES)
        with made.meshes[1].lock:
            made.meshes[1].send(0, [header, payload])
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


def test_a_failure_ends_the_waits_for_keys_that_began_before_it(trio, monitor):
    """And the user's function is called, also if it is given later. Neither happens twice."""
    store, state, called = monitor._store, trio.communicators[0].state, []
    before = time.monotonic()
    die(trio, 1)
    until_news(monitor)
    (told,) = store.failures
    assert told == (state.failure.message, False)
    assert "rank 1 " in told[0]
    assert before < store.times[0] == state.failed_at <= time.monotonic()
    monitor.callback = called.append
    monitor.poll()
    monitor.poll()
    assert [(type(error), error.ranks) for error in called] == [(RankFailedError, (1,))]
    die(trio, 2)
    wait_until(lambda: monitor.poll() or len(store.failures) >= 3, "the end of the last peer")
    (second, final) = store.failures[1:]
    assert "rank 2 " in second[0]
    assert store.times[1] > store.times[0]
    assert final[0].startswith("no other rank is left that could set a key: rank 1 ")
    assert final[1], "for good"
    assert [error.ranks for error in called] == [(1,), (2,)]
    monitor.poll()
    assert len(store.failures) == 3


def test_a_failure_of_the_world_that_is_no_death_ends_them_too(trio, monitor):
    state = trio.communicators[0].state
    state.fail(DistBackendError("it gave up", ranks=[2]))
    monitor.poll()
    monitor.poll()
    assert monitor._store.failures == [("it gave up", False)]
    assert monitor._store.times == [state.failed_at]


def test_one_that_leaves_in_order_ends_none(trio, monitor):
    trio.meshes[1].close("it was done")
    monitor.callback = lambda error: pytest.fail(str(error))
    wait_until(lambda: monitor.poll() or 1 in trio.meshes[0].lost_peers, "the goodbye")
    assert not monitor._store.failures


@pytest.fixture
def unanswered(trio: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds for which rank 1's host has answered nothing, as rank 0 is told; and what the clock says."""
    reported = {"silence": 0.0, "clock": 1000.0}
    connection = trio.meshes[0]._peers[1].connection
    monkeypatch.setattr(connection, "silent_seconds", lambda: reported["silence"], raising=False)
    monkeypatch.setattr(liveness.time, "monotonic", lambda: reported["clock"])
    return reported


def test_a_host_that_answers_nothing_for_long_is_held_for_failed(
    trio: World, monitor: Liveness, unanswered: dict[str, float]
) -> None:
    mesh = trio.meshes[0]
    for seconds in range(10):
        unanswered.update(silence=seconds + 1.0, clock=1000.0 + seconds)
        monitor.fail_silent_hosts()
        assert (1 in mesh.lost_peers) == (seconds >= liveness.SILENT_SECONDS)
    assert mesh.lost_peers[1].reason == "its host has answered nothing for 8 s: it, or the network to it, is down"
    assert not mesh.lost_peers[1].clean


def test_a_first_question_in_minutes_may_take_a_while_to_answer(
    trio: World, monitor: Liveness, unanswered: dict[str, float]
) -> None:
    for seconds in range(20):
        unanswered.update(silence=0.0 if seconds % 7 == 6 else 60.0, clock=1000.0 + seconds)
        monitor.fail_silent_hosts()
        assert not trio.meshes[0].lost_peers


def test_who_waits_is_told_of_a_silent_host_at_once(
    trio: World, monitor: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = trio.meshes[0]
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.0)
    for module in (engine, progress_thread):
        monkeypatch.setattr(module, "SLICE_SECONDS", 60.0)

    def call(members: LocalCommunicator) -> None:
        if members.rank == 1:
            wait_until(lambda: mesh._poller.asleep, "the engine")
            monkeypatch.setattr(mesh._peers[1].connection, "silent_seconds", lambda: 9.0, raising=False)
            monitor.fail_silent_hosts()
        elif members.rank == 0:
            with pytest.raises(RankFailedError, match="has answered nothing"):
                members.receive(np.zeros(3), 1, 0, NOW)

    trio.run(call)
