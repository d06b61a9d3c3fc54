"""The watchdog's thread: it runs checks while there are any, at their intervals, and ends with the last."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from rankmesh_agent.group.watchdog import Watchdog

SECONDS = 30.0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "watchdog-test"]


@pytest.fixture
def ran() -> queue.SimpleQueue[str]:
    """The checks that ran."""
    return queue.SimpleQueue()


def test_one_thread_runs_all_checks_and_ends_with_the_last(ran: queue.SimpleQueue[str]) -> None:
    watchdog = Watchdog("watchdog-test", SECONDS)

    def first() -> None:
        ran.put("first")

    def second() -> float:
        ran.put("second")
        return 0.001

    watchdog.add(first)
    for _ in range(3):  # it has no interval
        assert ran.get(timeout=SECONDS) == "first"
        watchdog.wake()
    watchdog.add(second)
    assert {ran.get(timeout=SECONDS) for _ in range(20)} == {"first", "second"}
    assert threads() == ["watchdog-test"]
    watchdog.remove(second)
    watchdog.remove(second)
    assert threads() == ["watchdog-test"]
    watchdog.remove(first)
    assert threads() == []
    watchdog.add(first)  # again, in another thread
    watchdog.remove(first)
    assert threads() == []


def test_a_check_that_raises_is_logged_and_the_others_go_on(
    ran: queue.SimpleQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog("watchdog-test", SECONDS)

    def broken() -> None:
        raise ValueError("on purpose")

    def check() -> None:
        ran.put("ran")
        watchdog.remove(check)  # from the watchdog's own thread

    with caplog.at_level(logging.WARNING, "rankmesh"):
        watchdog.add(broken)
        watchdog.add(check)
        assert ran.get(timeout=SECONDS) == "ran"
        watchdog.remove(broken)
    assert "watchdog-test: a check failed" in caplog.text
    assert "on purpose" in caplog.text
