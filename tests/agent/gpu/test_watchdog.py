"""The watchdog of calls on GPUs: it pauses without calls, and goes on with the next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import wait_until

from rankmesh_agent.gpu import watchdog
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

    def is_completed(self) -> bool:
        self.ended = self.ended or self.completed
        return self.ended

    def complete(self) -> None:
        self.ended = True

    def fail(self, error: DistError) -> None:
        self.error, self.ended = error, True


class Group:
    """The group: what it was aborted with."""

    name, rank, global_ranks = "world", 0, (0, 1)

    def __init__(self) -> None:
        self.failure: DistError | None = None

    def abort(self, error: DistError) -> None:
        self.failure = error

    def report_launch(self, seq: int, fingerprint: int, description: str) -> None:
        pass

    def launches_of_others(self) -> dict[int, Any]:
        return {}

    def peer_lost_error(self, members: object, during: str) -> None:
        return None


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def paused(group: Group, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A watchdog that has had a call, and pauses."""
    monkeypatch.setattr(watchdog, "_IDLE_SECONDS", 0.0)
    backend = SimpleNamespace(async_error=lambda: "", abort=lambda: None)
    found = watchdog.GpuWatchdog(group, backend)  # type: ignore[arg-type]
    call = Call()
    found.add(call)  # type: ignore[arg-type]
    call.completed = True
    found.drain(Deadline(SECONDS))
    wait_until(lambda: found._paused, "the watchdog to pause")
    time.sleep(0.02)  # it may be about to wait
    yield found
    found.close()


def test_a_call_after_a_pause_is_found_to_be_completed(paused: Any) -> None:
    call = Call()
    paused.add(call)
    future = paused.future_of(call)
    time.sleep(0.05)  # many checks
    assert not future.done()
    call.completed = True
    future.wait(SECONDS)


def test_a_call_after_a_pause_is_found_to_be_late(paused: Any, group: Group) -> None:
    call = Call(0.05)
    paused.add(call)
    wait_until(lambda: call.ended, "the call to be ended")
    assert isinstance(call.error, CollectiveTimeoutError)
    assert group.failure is call.error
    assert call.error.ranks == (1,)
    assert not paused.close()


def test_a_call_that_is_not_watched_any_more_holds_up_no_end(paused: Any) -> None:
    call = Call()
    paused.add(call)
    paused.remove(call)
    paused.drain(Deadline(SECONDS))
    paused.remove(call)  # a call that could not be launched was not always watched
    assert not paused.close()


def test_a_completed_collective_completes_those_before_it_on_its_stream(paused: Any) -> None:
    before, other, message, last = (Call() for _ in range(4))
    other.stream, last.completed, message.seq = 8, True, 0
    for call in (before, other, message, last):
        paused.add(call)
    wait_until(lambda: before.ended and last.ended, "the calls to be found completed")
    time.sleep(0.05)  # many checks
    assert not other.ended
    assert not message.ended
