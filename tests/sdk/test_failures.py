"""What the others see when a rank fails, strays or leaves: the table (support/failures.py), and what it cannot say."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import hosting
from support.failures import CELLS, EVENTS, SIZE, SOON, VICTIM, check, fail
from support.processes import Me, Rank, Ranks, on_ranks

import rankmesh as dist
from rankmesh.multiprocessing import ProcessException, start_processes

pytestmark = [pytest.mark.processes, hosting.embedded_only("the table has a column of its own for it")]
TRANSPORTS = ("shm", "tcp")


def begin(ranks: Ranks, event: str, medium: str) -> list[Rank]:
    return ranks.start(fail, SIZE, env=hosting.over(medium, ranks.folder, SIZE), event=event, http=medium == "http")


def end(ranks: Ranks, event: str, medium: str, started: list[Rank]) -> None:
    ranks.wait([started[0], started[2]])
    ranks.mark("over")
    if not EVENTS[event].codes:
        started[VICTIM].kill()
    ranks.wait(started)
    check(event, medium, started)


@pytest.mark.parametrize(("event", "medium"), [cell for cell in CELLS if not EVENTS[cell[0]].limited])
def test_a_rank_that_fails_or_leaves_is_named_in_every_call_that_waits(ranks: Ranks, event: str, medium: str) -> None:
    end(ranks, event, medium, begin(ranks, event, medium))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], None]]:
    """Return a function that checks a cell whose calls wait until their time limit; the cells wait together."""
    with contextlib.ExitStack() as stack:
        worlds = {}
        for event, medium in CELLS:
            if EVENTS[event].limited:
                ranks = Ranks(tmp_path_factory.mktemp("limited"))
                stack.callback(ranks.end)
                worlds[event, medium] = ranks, begin(ranks, event, medium)
                ranks.wait_for("waits-0", "waits-2")
        yield lambda event, medium: end(worlds[event, medium][0], event, medium, worlds[event, medium][1])
        for rank in (rank for _, started in worlds.values() for rank in started if rank.code is None):
            rank.kill()  # of a cell that is not selected


@pytest.mark.parametrize(("event", "medium"), [cell for cell in CELLS if EVENTS[cell[0]].limited])
def test_a_rank_that_makes_no_call_is_named_at_the_time_limit(
    limited: Callable[[str, str], None], event: str, medium: str
) -> None:
    limited(event, medium)


def wait_for_each_other(me: Me) -> None:
    me.init()
    dist.barrier()
    me.limit_calls(2.0)
    me.report(**me.attempt(dist.recv, np.ones(1), 1 - me.rank))
    me.meet("reported")
    dist.destroy_process_group()


def test_in_a_deadlock_each_rank_blames_the_other(ranks: Ranks) -> None:
    for rank, other in zip(ranks.run(wait_for_each_other, 2), (1, 0), strict=True):
        assert (rank.reported["error"], rank.reported["ranks"]) == ("CollectiveTimeoutError", [other])


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_what_was_sent_arrives_although_its_sender_has_left(me: Me) -> None:
    me.init()
    if me.rank == 0:
        for number in range(50):
            dist.send(np.full(512, float(number)), dst=1)
        dist.destroy_process_group()
        me.mark("left")
        return
    me.wait_for("left")
    for number in range(50):
        got = np.zeros(512)
        dist.recv(got, src=0)
        assert (got == number).all()
    dist.destroy_process_group()


def test_a_rank_replaces_neither_exit_nor_excepthook(alone: None) -> None:
    assert type(sys.exit).__name__ == "builtin_function_or_method"
    assert sys.excepthook is sys.__excepthook__


def end_in_spawn(index: int, folder: str) -> None:
    me = Me(index, 2, folder)
    me.init()
    dist.barrier()
    if index:
        reported = me.attempt(dist.recv, np.zeros(1), 0)
        Path(folder, "reported").write_text(reported["text"])
        dist.destroy_process_group()
    else:
        raise SystemExit(3)


def test_a_process_of_spawn_is_named_with_how_it_ended(tmp_path: Path) -> None:
    context = start_processes(end_in_spawn, (str(tmp_path),), 2, join=False)
    assert context is not None
    with contextlib.suppress(ProcessException):
        while not context.join(grace_period=SOON):
            pass
    assert ") left (it exited with status 3 without destroy_process_group) " in (tmp_path / "reported").read_text()


def interrupted_under_launcher(me: Me) -> None:
    me.rank, me.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(timeout=60)
    if me.rank == 0:
        me.interrupt_when_waiting(again=0.0)
    elif me.rank == 2:
        me.wait_for("told")
    reported = me.attempt(lambda: [dist.all_reduce(np.ones(1)) for _ in iter(int, 1)])  # the first one may complete
    if me.rank == 0:
        raise KeyboardInterrupt
    assert reported["ranks"] == [0], reported
    assert "KeyboardInterrupt" in reported["text"], reported
    me.mark("told" if me.rank == 1 else "told too")
    dist.destroy_process_group()


def test_under_the_launcher_the_others_learn_that_a_rank_was_interrupted(ranks: Ranks) -> None:
    script = ranks.script(interrupted_under_launcher)
    options = ("--nproc-per-node=3", "--failure-grace=60")
    launcher = ranks.command("-m", "rankmesh.run", *options, str(script), "0", "3", name="launcher")
    ranks.wait([launcher])
    assert launcher.code == 128 + signal.SIGINT, launcher
    ranks.wait_for("told", "told too")
    assert re.search("rank 0 failed( first)?: signal SIGINT", launcher.stderr), launcher  # first, if others have ended
