"""The progress engine, without peers."""

from __future__ import annotations

import os
import select

import pytest

from rankmesh_agent.progress.engine import ProgressEngine


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
