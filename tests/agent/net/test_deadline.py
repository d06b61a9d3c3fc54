"""Points in time, and what people give as a timeout."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest

from rankmesh_agent.net.deadline import Deadline, seconds_of


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only element is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_deadline_comes_nearer_and_passes(clock):
    deadline = Deadline(10)
    assert (deadline.remaining(), deadline.expired()) == (10, False)
    clock[0] += 9.5
    assert (deadline.remaining(), deadline.expired()) == (0.5, False)
    clock[0] += 0.5
    assert (deadline.remaining(), deadline.expired()) == (0, True)
    clock[0] += 100
    assert (deadline.remaining(), deadline.expired()) == (0, True), "never below 0"
    assert deadline.seconds == 10


def test_an_endless_deadline_never_passes(clock):
    deadline = Deadline(math.inf)
    clock[0] += 1e12
    assert not deadline.expired()
    assert deadline.remaining() >= 3600


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (None, 7.0),
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (timedelta(minutes=2, milliseconds=5), 120.005),
        (math.inf, math.inf),
    ],
)
def test_seconds_of(timeout, seconds):
    assert seconds_of(timeout, 7.0) == seconds


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, timedelta(seconds=-1)])
def test_a_timeout_that_makes_no_sense(timeout):
    with pytest.raises(ValueError, match="timeout must not be negative"):
        seconds_of(timeout, 7.0)
