"""Ctrl-C, once and twice, in a rank that waits: the other ranks learn at once that it was interrupted."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist
from rankmesh_agent.membership.heartbeats import HeartbeatThread

pytestmark = pytest.mark.processes


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_in_call(again: float | str | None) -> None:
    """Interrupt the main thread once it waits in RankMesh, and perhaps again.

    Args:
        again: seconds between the two; or ``"exit"``: as the agent ends its threads; ``"destroy"``: never.
    """
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        inside = 0
        while inside < 10:
            time.sleep(0.02)
            frames = traceback.extract_stack(sys._current_frames()[main])
            inside = inside + 1 if any("/rankmesh_agent/" in frame.filename for frame in frames) else 0
        interrupt()
        if isinstance(again, float):
            time.sleep(again)
            interrupt()

    if again == "exit":
        original = HeartbeatThread.stop

        def stop(self: HeartbeatThread) -> None:
            interrupt()
            original(self)

        HeartbeatThread.stop = stop  # type: ignore[method-assign]
    threading.Thread(target=watch, daemon=True).start()


def reduce_until_told(asynchronous: bool) -> None:
    """Make calls: the first may complete, since the ranks before have put all that it needs into shared memory."""
    while True:
        work = dist.all_reduce(np.ones(1), async_op=asynchronous)
        if work is not None:
            work.wait()


def interrupted(me: Me, again: float | str | None, call: str = "all_reduce") -> None:
    """Rank 0 is interrupted while it waits for rank 2; rank 1 waits, too; rank 2 calls later."""
    me.init(timeout=60)
    if me.rank == 0:
        interrupt_in_call(again)
    elif me.rank == 2:
        me.wait_for("interrupted" if call == "async" else "told")  # what has begun goes on without its waiter
    if call == "recv" and me.rank == 0:
        reported = me.attempt(dist.recv, np.ones(1), 2)
    else:
        reported = me.attempt(reduce_until_told, call == "async")
    me.report(**reported)
    if me.rank == 0:
        me.mark("interrupted")
        try:
            raise KeyboardInterrupt
        finally:
            if again == "destroy":
                dist.destroy_process_group()
    assert reported["ranks"] == [0], reported
    assert "KeyboardInterrupt" in reported["text"], reported
    assert reported["seconds"] < 20, reported
    me.mark("told" if me.rank == 1 else "told too")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("medium", "call", "again"),
    [
        ("shm", "all_reduce", None),
        ("shm", "all_reduce", 0.003),
        ("tcp", "all_reduce", 0.0),
        ("tcp", "all_reduce", "exit"),
        ("aab", "all_reduce", None),
        ("tcp", "recv", None),
        ("tcp", "async", "destroy"),
    ],
)
def test_the_others_learn_that_a_rank_was_interrupted(
    ranks: Ranks, over: Callable, medium: str, call: str, again: Any
) -> None:
    started = ranks.start(interrupted, 3, env=over(medium), again=again, call=call)
    ranks.wait(started)
    assert [rank.code for rank in started[1:]] == [0, 0], ranks.transcript()
    # Python forgets at times, when code runs at its exit, that Ctrl-C ended it.
    assert started[0].code in (-signal.SIGINT, 1), ranks.transcript()
    # It gives up its traceback when the second Ctrl-C comes while it prints that.
    assert "\nKeyboardInterrupt\n" in started[0].stderr or "lost sys.stderr" in started[0].stderr, ranks.transcript()
    if again == "exit":
        assert started[0].stderr.endswith("\nrankmesh: interrupted while it left the job\n"), ranks.transcript()


def interrupted_under_launcher(me: Me) -> None:
    me.rank, me.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["RANKMESH_TIMEOUT"] = "60"
    me.init = lambda **_: dist.init_process_group()  # type: ignore[method-assign]
    interrupted(me, 0.0)


def test_so_they_do_under_the_launcher(ranks: Ranks) -> None:
    script = ranks.script(interrupted_under_launcher)
    options = ("--nproc-per-node=3", "--failure-grace=60")
    launcher = ranks.command("-m", "rankmesh.run", *options, str(script), "0", "3", name="launcher")
    ranks.wait([launcher])
    assert launcher.code == 128 + signal.SIGINT, launcher
    ranks.wait_for("told", "told too")
    assert re.search("rank 0 failed( first)?: signal SIGINT", launcher.stderr), launcher  # first, if others have ended
