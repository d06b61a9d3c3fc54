"""Ctrl-C at one rank while it waits: it gets through at once, and the others are told which rank gave up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

SOON = 30.0
"""Seconds within which Ctrl-C must get through, and the others must know."""


def wait_in(call: str) -> None:
    """Call something that lasts until another rank does its part."""
    array = np.ones(1000)
    match call:
        case "all_reduce":
            dist.all_reduce(array)
        case "all_reduce async":
            dist.all_reduce(array, async_op=True).wait()
        case "recv":
            dist.recv(array, src=0)


def be_interrupted(me: Me, call: str, destroys: bool) -> None:
    """Rank 1 waits and is interrupted; rank 0 waits with it, rank 2 comes late."""
    me.init()
    dist.barrier()
    if me.rank == 1:
        me.interrupt_when_waiting()
        try:
            wait_in(call)
        finally:
            me.report(ended_at=time.monotonic())
            me.mark("interrupted")
            if destroys:
                dist.destroy_process_group()
        return
    partner = "all_reduce" if call == "recv" else call
    if me.rank == 2:
        me.wait_for("interrupted")
    began = time.monotonic()
    attempts = [me.attempt(wait_in, partner) for _ in range(3)]
    me.report(began=began, attempts=attempts)


@pytest.mark.parametrize(
    ("medium", "call", "destroys"),
    [
        ("shm", "all_reduce", False),
        ("tcp", "recv", False),
        ("aab", "all_reduce", False),
        ("tcp", "all_reduce async", True),
    ],
)
def test_the_others_are_told_which_rank_was_interrupted(
    ranks: Ranks, over: Callable, medium: str, call: str, destroys: bool
) -> None:
    started = ranks.start(be_interrupted, 3, env=over(medium), call=call, destroys=destroys)
    ranks.wait(started)
    interrupted = started[1]
    # Python forgets at times, when code runs at its exit, that Ctrl-C ended it.
    assert interrupted.code in (-signal.SIGINT, 1), ranks.transcript()
    assert interrupted.stderr.endswith("\nKeyboardInterrupt\n"), ranks.transcript()
    assert interrupted.reported["ended_at"] - interrupted.reported["interrupted_at"] < SOON
    for other in (started[0], started[2]):
        assert other.code == 0, ranks.transcript()
        attempts = other.reported["attempts"]
        if attempts[0]["error"] is None:  # what rank 1 had contributed before it was interrupted was enough
            del attempts[0]
        for error in attempts:
            assert "DistBackendError" in error["is"], ranks.transcript()
            assert error["ranks"] == [1], ranks.transcript()
            assert "rank 1" in error["text"]
            assert error["at"] - max(other.reported["began"], interrupted.reported["interrupted_at"]) < SOON, (
                ranks.transcript()
            )
