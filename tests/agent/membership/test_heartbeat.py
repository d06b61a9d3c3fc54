"""Times at which the heartbeat thread sends."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rankmesh_agent.membership import heartbeats
from rankmesh_agent.membership.heartbeats import HeartbeatThread

DEADLINE = 20.0


class Sender:
    """Records when it is called, and fails as often as a test wants."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.failures = 0
        self._calls: queue.Queue[float] = queue.Queue()

    def __call__(self) -> None:
        self._calls.put(time.monotonic())
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the gateway cannot be asked")

    def wait_for(self, count: int) -> None:
        while len(self.times) < count:
            self.times.append(self._calls.get(timeout=DEADLINE))


class Failures:
    """A failure detector that a test triggers."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.news = False
        self.due_seconds = float("inf")
        self.looks, self.news_after = 0, float("inf")
        self.looked = threading.Event()

    def trigger(self, *, news: bool) -> None:
        self.looked.clear()
        self.news = news
        os.eventfd_write(self.descriptor, 1)

    def fileno(self) -> int:
        return self.descriptor

    def poll(self) -> bool:
        self.looks += 1
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return self.looks >= self.news_after
        self.looked.set()
        return self.news

    def next_check(self) -> float:
        return self.due_seconds

    def __del__(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def start(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HeartbeatThread]]:
    """A function that starts a thread, which is stopped in the end; without ``interval`` it sends only urgent news."""
    threads: list[HeartbeatThread] = []

    def begin(failures: Failures | None = None, *, interval: float = 3600.0) -> HeartbeatThread:
        monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", interval)
        threads.append(HeartbeatThread(sender, failures))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.stop()


def test_heartbeats_are_regular_and_failures_do_not_end_them(start, sender, caplog):
    sender.failures = 2
    began = time.monotonic()
    start(interval=0.02)
    sender.wait_for(5)
    assert all(at - began >= 0.02 * number for number, at in enumerate(sender.times, 1))
    assert caplog.text.count("could not be sent") == 2


def test_many_wakes_are_few_heartbeats(start, sender):
    began = time.monotonic()
    thread = start()
    for count in range(3):
        for _ in range(100):
            thread.wake()
        sender.wait_for(count + 1)
    interval = heartbeats._MIN_INTERVAL_SECONDS
    assert all(at - began >= interval * number for number, at in enumerate(sender.times, 1))


def test_a_failed_peer_is_reported_at_once_and_one_that_has_left_is_not(start, sender):
    failures = Failures()
    start(failures)
    failures.trigger(news=False)
    assert failures.looked.wait(DEADLINE)
    assert sender._calls.empty()
    failures.trigger(news=True)
    sender.wait_for(1)


def test_another_sender_and_its_detector_take_over(start, sender):
    failures, early = Failures(), []
    thread = start()
    thread._send = lambda: early.append(1)
    thread.take_over(sender, failures)
    failures.trigger(news=False)
    assert failures.looked.wait(DEADLINE)
    assert sender._calls.empty(), "that is no news"
    failures.trigger(news=True)
    sender.wait_for(1)
    assert not early


def test_the_detector_is_asked_again_when_that_is_due(start, sender):
    failures = Failures()
    failures.due_seconds, failures.news_after = 0.01, 3
    start(failures)
    sender.wait_for(1)
    assert failures.looks >= 3


@pytest.mark.parametrize("started", [True, False])
def test_stop_closes_the_descriptor(start, started):
    thread = start(Failures()) if started else HeartbeatThread(lambda: None)
    thread.stop()
    assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(thread._wakeup, 1)
    thread.stop()
    thread.wake()
