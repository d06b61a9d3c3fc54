"""The watchdog of calls on GPUs: it finds the calls that have ended, and those that are late."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import wait_until

from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.watchdog import GpuWatchdog
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError

SECONDS = 30.0
numbers = itertools.count(1)


class Call:
    """A launched call, which the GPU completes when the test says so."""

    device, stream, peers, op, description = 0, 7, (1,), "all_reduce", "all_reduce(float32[1], SUM)"

    def __init__(self, seconds: float = SECONDS) -> None:
        self.deadline = Deadline(seconds)
        self.future: Any = None
        self.error: DistError | None = None
        self.completed = self.ended = False
        self.seq, self.fingerprint = next(numbers), 7
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        self.ended = self.ended or self.completed
        return self.ended

    def complete(self) -> None:
        self.ended = True

    request_future, complete_future = Launch.request_future, Launch.complete_future

    def fail(self, error: DistError) -> None:
        self.error, self.ended = error, True


class Group:
    """The group of an attached process: what it was aborted with."""

    name, rank, global_ranks, launch_monitor = "world", 0, (0, 1), None

    def __init__(self) -> None:
        self.failure: DistError | None = None

    def abort(self, error: DistError) -> None:
        self.failure = error


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def idle(group: Group) -> Iterator[Any]:
    """A watchdog that has had a call."""
    backend = SimpleNamespace(async_error=lambda: "", abort=lambda: None)
    found = GpuWatchdog(group, backend)  # type: ignore[arg-type]
    call = Call()
    found.add(call)  # type: ignore[arg-type]
    call.completed = True
    found.drain(Deadline(SECONDS))
    yield found
    found.close()


def test_a_call_after_others_is_found_to_be_completed(idle: Any) -> None:
    call = Call()
    idle.add(call)
    future = idle.future_of(call)
    time.sleep(0.05)  # many checks
    assert not future.done()
    call.completed = True
    future.wait(SECONDS)


def test_a_call_after_others_is_found_to_be_late(idle: Any, group: Group) -> None:
    call = Call(0.05)
    idle.add(call)
    wait_until(lambda: call.ended, "the call to be ended")
    assert isinstance(call.error, CollectiveTimeoutError)
    assert group.failure is call.error
    assert call.error.ranks == (1,)
    assert not idle.close()


def test_a_call_that_is_not_watched_any_more_holds_up_no_end(idle: Any) -> None:
    call = Call()
    idle.add(call)
    idle.remove(call)
    idle.drain(Deadline(SECONDS))
    idle.remove(call)  # a call that could not be launched was not always watched
    assert not idle.close()


def test_a_completed_collective_completes_those_before_it_on_its_stream(idle: Any) -> None:
    before, other, message, last = (Call() for _ in range(4))
    other.stream, last.completed, message.seq = 8, True, 0
    for call in (before, other, message, last):
        idle.add(call)
    wait_until(lambda: before.ended and last.ended, "the calls to be found completed")
    time.sleep(0.05)  # many checks
    assert not other.ended
    assert not message.ended
