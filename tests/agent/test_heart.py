"""When a heart beats."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rankmesh_agent.membership import gateway_client as gateway_module
from rankmesh_agent.membership.gateway_client import Heart

DEADLINE = 20.0


class Beats:
    """Counts."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.fails = 0
        self._came = threading.Condition()

    def __call__(self) -> None:
        with self._came:
            self.times.append(time.monotonic())
            self._came.notify_all()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the test says so")

    def wait_for(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.times) >= count, DEADLINE), f"{len(self.times)} of {count}"


class Watch:
    """A vigil that a test rings."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.news = False
        self.soon = float("inf")
        self.looked = threading.Event()
        self.closed = False

    def ring(self, *, news: bool) -> None:
        self.looked.clear()
        self.news = news
        os.eventfd_write(self.bell, 1)

    def fileno(self) -> int:
        return self.bell

    def poll(self) -> bool:
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            return False
        self.looked.set()
        return self.news

    def next_check(self) -> float:
        return self.soon

    def close(self) -> None:
        os.close(self.bell)
        self.closed = True


@pytest.fixture
def beats() -> Beats:
    return Beats()


@pytest.fixture
def start(beats: Beats) -> Iterator[Callable[..., Heart]]:
    """A function that starts a heart, which is stopped in the end."""
    hearts: list[Heart] = []

    def begin(vigil: Watch | None = None) -> Heart:
        heart = Heart(beats, vigil)  # type: ignore[arg-type]
        hearts.append(heart)
        heart.start()
        return heart

    yield begin
    for heart in hearts:
        heart.stop()


def test_it_beats_regularly(start, beats, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 0.02)
    began = time.monotonic()
    start()
    beats.wait_for(5)
    assert all(at - began >= 0.02 * number for number, at in enumerate(beats.times, 1))


def test_it_beats_when_woken(start, beats, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    heart = start()
    heart.wake()
    beats.wait_for(1)


def test_many_wakes_are_few_beats(start, beats, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    began = time.monotonic()
    heart = start()
    for _ in range(3):
        for _ in range(100):
            heart.wake()
        time.sleep(0.05)
    beats.wait_for(2)
    assert all(at - began >= gateway_module._BREATH_SECONDS * number for number, at in enumerate(beats.times, 1))


def test_it_beats_when_a_peer_is_gone_and_not_when_one_has_left(start, beats, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    watch = Watch()
    start(watch)
    watch.ring(news=False)
    assert watch.looked.wait(DEADLINE)
    assert beats.times == []
    watch.ring(news=True)
    beats.wait_for(1)


def test_it_looks_again_when_that_is_due(start, beats, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    watch = Watch()
    watch.soon = 0.01
    looks: list[None] = []

    def look() -> bool:
        looks.append(None)
        return len(looks) >= 3

    monkeypatch.setattr(watch, "look", look)
    start(watch)
    beats.wait_for(1)
    assert len(looks) >= 3


def test_it_goes_on_after_a_failure(start, beats, monkeypatch, caplog):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 0.01)
    beats.fails = 2
    start()
    beats.wait_for(4)
    assert caplog.text.count("could not be sent") == 2


def test_it_stops_at_once_and_lets_go_of_its_descriptors(start, monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    watch = Watch()
    heart = start(watch)
    heart.stop()
    assert not heart.is_alive()
    assert watch.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(heart._bell, 1)
    heart.stop()
    heart.wake()


def test_one_that_was_never_started_is_stopped_too():
    watch = Watch()
    Heart(lambda: None, watch).stop()  # type: ignore[arg-type]
    assert watch.closed
