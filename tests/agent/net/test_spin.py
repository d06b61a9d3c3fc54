"""Looking around before going to sleep: when it is done, and when it is not."""

from __future__ import annotations

import os
import socket

import pytest

from rankmesh_agent.net import spin
from rankmesh_agent.net.spin import SPIN_SECONDS, AdaptiveSpin


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


def test_arguments_are_passed_on():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"word")
        assert AdaptiveSpin(ours.recv, 2, socket.MSG_DONTWAIT).poll() == b"wo"


def test_errors_are_the_callers(world, one):
    world.reported = [ConnectionResetError()]
    with pytest.raises(ConnectionResetError):
        one.poll()


def off(world: World, one: AdaptiveSpin[object]) -> int:
    """Return how many times it is not looked before it is again, in vain."""
    before, times = world.looks, 0
    while True:
        assert one.poll() is None
        if world.looks > before:
            return times
        times += 1


def test_the_more_often_it_is_in_vain_the_rarer_it_is_done(world, one):
    assert [off(world, one) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_a_message_makes_it_worth_while_again(world, one):
    assert [off(world, one) for _ in range(4)] == [0, 1, 2, 4]
    world.reported = ["here"]
    assert [one.poll() for _ in range(9)] == [None] * 8 + ["here"]
    assert [off(world, one) for _ in range(3)] == [0, 1, 2]


def test_the_longer_looking_took_the_rarer_it_is_done(world, one):
    """What it finds so late is returned, but was not worth it."""
    world.seconds = 10.5 * SPIN_SECONDS
    world.reported = ["late"]
    assert one.poll() == "late"
    world.seconds = SPIN_SECONDS
    assert [off(world, one) for _ in range(2)] == [10, 2]


def test_a_single_core_has_nobody_to_look_for(world, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    world.reported = ["here"]
    one = AdaptiveSpin(world.attempt)
    assert [one.poll() for _ in range(3)] == [None] * 3
    assert world.looks == 0
