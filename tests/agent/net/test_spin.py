"""Looking around before going to sleep: when it is done, and when it is not."""

from __future__ import annotations

import os

import pytest

from rankmesh_agent.net import spin
from rankmesh_agent.net.spin import SPIN_SECONDS, AdaptiveSpin, CoreContention


class World:
    """Something to look at, and a clock. Nothing in it happens by itself.

    Attributes:
        reported: what the next looks find; all others find 0.
        looks: how many there were.
        seconds: how long a look takes.
        now: the time.
    """

    def __init__(self) -> None:
        self.reported: list[object] = []
        self.looks = 0
        self.seconds = SPIN_SECONDS / 4
        self.now = 0.0

    def attempt(self) -> object:
        self.looks += 1
        self.now += self.seconds
        found = self.reported.pop(0) if self.reported else 0
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.fixture
def world(monkeypatch) -> World:
    found = World()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(spin, "monotonic", lambda: found.now)
    monkeypatch.setattr(spin, "core_contention", CoreContention())
    return found


@pytest.fixture
def one(world) -> AdaptiveSpin[object]:
    return AdaptiveSpin(world.attempt)


def test_what_is_there_is_returned_at_once(world, one):
    world.reported = ["here"]
    assert one.poll() == "here"
    assert world.looks == 1


@pytest.mark.parametrize("nothing", [0, [], b"", BlockingIOError()], ids=["0", "list", "bytes", "error"])
def test_what_comes_soon_is_waited_for(world, one, nothing):
    world.reported = [nothing, nothing, "later"]
    assert one.poll() == "later"


def test_what_does_not_come_is_not(world, one):
    world.reported = [0, 0, 0, 0, "too late"]
    assert one.poll() is None
    assert world.looks == 4


def test_calls_in_vain_look_ever_more_seldom(world, one):
    assert [one.poll() for _ in range(200)] == [None] * 200
    assert 4 < world.looks <= 4 * 10


def test_a_single_core_has_nobody_to_look_for(world, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    world.reported = ["here"]
    one = AdaptiveSpin(world.attempt)
    assert [one.poll() for _ in range(3)] == [None] * 3
    assert world.looks == 0


class Host:
    """Cores that other programs may want.

    Attributes:
        turn: how long a yield takes.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = 1e-6
        self.cores = CoreContention()
        self._world = world
        monkeypatch.setattr(os, "sched_yield", self._turn)

    def _turn(self) -> None:
        self._world.now += self.turn

    def blocked(self, seconds: float = 0.0) -> float:
        """Poll after some seconds; return how long waits block at once from then on."""
        self._world.now += seconds
        assert self.cores.should_spin()
        self.cores.yield_core()
        began = self._world.now
        while not self.cores.should_spin():
            self._world.now += 0.001
        return round(self._world.now - began, 2)


@pytest.fixture
def host(world, monkeypatch) -> Host:
    return Host(world, monkeypatch)


def test_on_free_cores_waits_poll(host):
    assert [host.blocked() for _ in range(100)] == [0] * 100
    assert host.cores.yield_core()


def test_a_single_turn_of_another_program_is_a_disturbance(host):
    host.turn = 0.003
    assert not host.cores.yield_core()
    assert host.cores.should_spin()
    assert [host.blocked(1.0) for _ in range(5)] == [0] * 5


def test_while_other_programs_stay_waits_block_ever_longer(host):
    host.turn = 0.003
    blocked = [host.blocked() for _ in range(12)]
    assert blocked == sorted(blocked)
    assert blocked[0] == 0 < blocked[1] < 1 < blocked[-1] < 2
    host.turn = 1e-6
    assert [host.blocked(0.1) for _ in range(5)] == [0] * 5


def test_on_a_busy_host_a_message_is_not_looked_for(host, world, one, monkeypatch):
    monkeypatch.setattr(spin, "core_contention", host.cores)
    host.turn = 0.003
    while host.cores.should_spin():
        host.cores.yield_core()
    world.reported = ["here"]
    assert one.poll() is None
    world.now += 1.0
    assert one.poll() == "here"
