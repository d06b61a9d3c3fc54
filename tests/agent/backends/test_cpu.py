"""Who moves the bytes, and when: the threads that wait, and the one in the background. Ranks as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.processes import wait_until
from support.threads import LATER, NOW, TRANSPORTS, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.progress import engine, progress_thread
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.progress_thread import ProgressThread
from rankmesh_agent.transports.shm_ring import RING_BYTES

TIMEOUT = 20.0
LONG = 60.0
EAGER = 1 << 12  # as support.threads sets it


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(2, request.param) as made:
        yield made


def send(members: LocalCommunicator, to: int, tag: int = 0) -> None:
    members.send(np.ones(3), to, tag, NOW)


def test_a_background_leader_gives_way_at_once(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks once more whether there is something to do, not over and over while it keeps the lock."""
    looks: dict[Any, int] = dict.fromkeys(pair.meshes, 0)
    idle = ProgressThread._idle

    def counted(thread: ProgressThread) -> bool:
        looks[thread._engine] += 1
        return idle(thread)

    monkeypatch.setattr(ProgressThread, "_idle", counted)
    go = threading.Event()

    def call(members: LocalCommunicator) -> None:
        mesh = members.engine
        if members.rank == 0:
            later = members.receive(np.zeros(3), 1, 9, LATER)
            wait_until(lambda: mesh.background.driving and mesh._poller.asleep, "the engine")
            before = looks[mesh]
            go.set()
            members.receive(np.zeros(3), 1, 0, NOW)
            assert looks[mesh] - before < 100
            send(members, 1)
            later.wait()
        else:
            assert go.wait(TIMEOUT)
            wait_until(
                lambda: pair.meshes[0]._followers == 1 or not pair.meshes[0].background.driving,
                "the progress engine",
                TIMEOUT,
            )
            send(members, 0)
            members.receive(np.zeros(3), 0, 0, NOW)
            send(members, 0, 9)

    pair.run(call)


def test_the_background_stays_away_from_who_calls_again_and_again(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_thread, "_GRACE_SECONDS", LONG)
    leaders: set[str] = set()
    lead = ProgressEngine.drive

    def noted(mesh: ProgressEngine, *arguments: Any) -> bool:
        leaders.add(threading.current_thread().name)
        return lead(mesh, *arguments)

    monkeypatch.setattr(ProgressEngine, "drive", noted)

    def call(members: LocalCommunicator) -> None:
        for count in (1, EAGER // 8, 50_000):
            arrays = [np.full(count, float(members.rank)) for _ in range(64)]
            if members.rank == 0:
                works = [members.send(array, 1, 0, LATER) for array in arrays]
            else:
                works = [members.receive(array, 0, 0, LATER) for array in arrays]
            for work in works:
                work.wait()
            assert not any(array.any() for array in arrays)
        members.barrier(NOW)

    pair.run(call)
    assert leaders
    assert "rankmesh-progress" not in leaders


def test_messages_go_on_as_soon_as_nobody_calls_any_more(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the last one who called waited so long that the background thread had gone to rest."""
    for module in (engine, progress_thread):
        monkeypatch.setattr(module, "SLICE_SECONDS", LONG)
    received, resting = threading.Event(), threading.Event()

    def call(members: LocalCommunicator) -> None:
        mesh = members.engine
        if members.rank == 0:
            work = members.send(np.ones(1_000_000), 1, 5, LATER)
            members.receive(np.zeros(3), 1, 0, NOW)
            assert received.wait(TIMEOUT)  # this rank does not make progress itself
            work.wait()
        else:
            first = pair.meshes[0]  # its rank waits, and drives the engine itself or follows the background thread
            wait_until(lambda: first.driven and (first.background.resting or first._followers), "rank 0 to wait")
            resting.set()
            send(members, 0)
            members.receive(np.zeros(1_000_000), 0, 5, NOW)
            received.set()
        assert not mesh.closed

    pair.run(call)
    assert resting.is_set()


def test_messages_go_on_while_somebody_only_begins_others(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread stays away from who calls again and again, but not when nobody moves anything."""
    monkeypatch.setattr(progress_thread, "_GRACE_SECONDS", 0.05)
    received = threading.Event()

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            works = [members.send(np.ones(1_000_000), 1, 5, LATER)]
            deadline = time.monotonic() + TIMEOUT
            while not received.is_set():
                assert time.monotonic() < deadline
                works.append(members.send(np.ones(1), 1, 0, LATER))
                time.sleep(0.001)
            members.send(np.zeros(1), 1, 0, NOW)
            for work in works:
                work.wait()
        else:
            members.receive(np.zeros(1_000_000), 0, 5, NOW)
            received.set()
            got = np.ones(1)
            while got[0]:
                members.receive(got, 0, 0, NOW)

    pair.run(call)


def test_a_leader_that_sleeps_learns_that_something_waits_for_room(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked to be woken by what comes; another thread has filled the connection since."""
    for module in (engine, progress_thread):
        monkeypatch.setattr(module, "SLICE_SECONDS", LONG)
    monkeypatch.setattr(progress_thread, "_GRACE_SECONDS", LONG)
    many = 4 * RING_BYTES // EAGER
    filled = threading.Event()

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            other = threading.Thread(target=members.receive, args=(np.zeros(3), 1, 9, NOW))
            other.start()
            wait_until(lambda: members.engine._poller.asleep, "the engine")
            works = [members.send(np.full(EAGER // 8, float(number)), 1, 0, LATER) for number in range(many)]
            filled.set()
            for work in works:
                work.wait()
            send(members, 1)
            other.join(TIMEOUT)
            assert not other.is_alive()
        else:
            assert filled.wait(TIMEOUT)
            for number in range(many):
                got = np.zeros(EAGER // 8)
                members.receive(got, 0, 0, NOW)
                assert (got == number).all()
            members.receive(np.zeros(3), 0, 0, NOW)
            send(members, 0, 9)

    pair.run(call)
