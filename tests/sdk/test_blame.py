"""Whom a timeout names: the rank that does not take part, not those who wait for it in turn. Ranks are processes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.processes import Me, Rank, Ranks

import rankmesh as dist
from rankmesh_agent.group import local_state, messages
from rankmesh_agent.progress import wait_graph

pytestmark = pytest.mark.processes

SECONDS = 8.0
"""Time limit of the calls. A test waits for it once: its worlds, one for each medium, do so at the same time."""
SLOWNESS = 7
"""How many times as long as usual the ranks have to ask each other for whom they wait: on a busy machine, a rank that
has no core for the usual time is blamed, and rightly so."""


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[[str], Ranks]]:
    """Return a function that gives the ranks of a world of its own, by name."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> Ranks:
            (tmp_path / name).mkdir()
            ranks = Ranks(tmp_path / name)
            stack.callback(ranks.end)
            return ranks

        yield make


@pytest.fixture
def run(worlds, over) -> Callable[..., dict[str, list[Rank]]]:
    """Return a function that runs a body over several media at the same time, and gives the ranks by medium."""

    def run(body: Callable[[Me], None], size: int, media: Sequence[str]) -> dict[str, list[Rank]]:
        running = {medium: worlds(medium) for medium in media}
        started = {medium: ranks.start(body, size, env=over(medium)) for medium, ranks in running.items()}
        for medium, ranks in running.items():
            ranks.succeed(started[medium])
        return started

    return run


def init(me: Me) -> None:
    for module in (wait_graph, messages, local_state):
        module.ASK_SECONDS *= SLOWNESS
    wait_graph._ANSWER_SECONDS *= SLOWNESS
    wait_graph._VALID_SECONDS *= SLOWNESS
    me.init()


def reduce_for_ever(count: int) -> None:
    array = np.ones(count, np.float32)
    while True:
        dist.all_reduce(array)


def reduce_until_a_rank_is_stopped(me: Me, count: int) -> None:
    init(me)
    dist.barrier()
    me.limit_calls(SECONDS)
    me.mark(f"going-{me.rank}")
    me.report(**me.attempt(reduce_for_ever, count))


def test_a_stopped_rank_is_blamed_and_no_other(worlds, over) -> None:
    with contextlib.ExitStack() as stack:
        waiting = []
        for medium, count in (("shm", 1_000_000), ("aabb", 1)):
            ranks = worlds(f"{medium}-{count}")
            started = ranks.start(reduce_until_a_rank_is_stopped, 4, env=over(medium), count=count)
            ranks.wait_for(*(f"going-{rank}" for rank in range(4)))
            time.sleep(0.3)
            started[2].kill(signal.SIGSTOP)
            stack.callback(end_stopped, ranks, started)
            waiting.append((medium, ranks, [started[rank] for rank in (0, 1, 3)]))
        for medium, ranks, others in waiting:
            ranks.wait(others)
            check_blame_of_rank_2(medium, ranks, others)


def end_stopped(ranks: Ranks, started: Sequence[Rank]) -> None:
    started[2].kill()
    ranks.wait(started)


def check_blame_of_rank_2(medium: str, ranks: Ranks, others: Sequence[Rank]) -> None:
    for rank in others:
        assert rank.reported["ranks"] == [2], ranks.transcript()
        assert "CollectiveTimeoutError" in rank.reported["is"] or "gave up: " in rank.reported["text"]
        assert f"waited {SECONDS} s for rank 2 (" in rank.reported["text"]
        arrived = rank.reported["text"].partition("arrived: ")[2].partition(";")[0].split(", ")
        # One rank may still be in the call before; of two hosts, both of the other one, whose leader waits for rank 2.
        assert len(arrived) > (0 if medium == "aabb" else 1)
        assert {*arrived} <= {"0", "1", "3"}


def wait_in_a_chain(me: Me) -> None:
    """Rank 0 waits for 1 in the world, 1 for 2 in a message, 2 for 3 in another group; 3 makes no call."""
    init(me)
    pair = dist.new_group([2, 3], timeout=SECONDS)
    dist.barrier()
    me.limit_calls(SECONDS)
    if me.rank == 0:
        me.report(**me.attempt(dist.broadcast, np.ones(1), 1))
    elif me.rank == 1:
        me.report(**me.attempt(dist.recv, np.ones(1), 2))
    elif me.rank == 2:
        me.report(**me.attempt(dist.all_reduce, np.ones(1), group=pair))
    me.meet("reported")
    dist.destroy_process_group()


def test_ranks_that_wait_for_each_other_blame_the_one_they_all_wait_for(run) -> None:
    for medium, started in run(wait_in_a_chain, 4, ["shm", "tcp"]).items():
        for rank in started[:3]:
            assert rank.reported["ranks"] == [3], (medium, rank.reported)
            assert f"waited {SECONDS} s for rank 3 (" in rank.reported["text"]
            assert rank.reported["seconds"] < SECONDS + 20
        assert "; rank 1 waits in recv from rank 2 (tag 0) in group 'world'" in started[0].reported["text"]


def wait_for_each_other(me: Me) -> None:
    init(me)
    dist.barrier()
    me.limit_calls(SECONDS)
    me.report(**me.attempt(dist.recv, np.ones(1), 1 - me.rank))
    me.meet("reported")
    dist.destroy_process_group()


def test_in_a_deadlock_each_blames_the_other(ranks: Ranks) -> None:
    for rank, other in zip(ranks.run(wait_for_each_other, 2), (1, 0), strict=True):
        assert rank.reported["ranks"] == [other]


def wait_for_a_rank_that_makes_a_group(me: Me) -> None:
    """Rank 3 makes no call, rank 1 makes a group with it, and rank 0 waits for a message of rank 1 a moment longer."""
    init(me)
    dist.barrier()
    me.limit_calls(SECONDS)
    if me.rank in (1, 2):
        me.mark(f"begins-{me.rank}")
        me.report(**me.attempt(dist.new_group, [1, 2, 3], SECONDS))
    elif me.rank == 0:
        me.wait_for("begins-1", "begins-2")
        time.sleep(0.1)
        me.report(**me.attempt(dist.recv, np.ones(1), 1))
    me.meet("reported")
    dist.destroy_process_group()


def test_a_rank_that_is_missing_in_a_new_group_is_blamed_by_others(run) -> None:
    for medium, started in run(wait_for_a_rank_that_makes_a_group, 4, ["tcp"]).items():
        for rank in started[:3]:
            assert rank.reported["ranks"] == [3], (medium, rank.reported)


def leave_after_a_timeout(me: Me) -> None:
    """Rank 0 makes no call; rank 1 gives up a message of it, and leaves in order, for which rank 2 waits."""
    init(me)
    dist.barrier()
    me.limit_calls(SECONDS)
    if me.rank == 1:
        me.report(**me.attempt(dist.recv, np.ones(1), 0))
        dist.destroy_process_group()
        return
    if me.rank == 2:
        me.report(**me.attempt(dist.recv, np.ones(1), 1, timeout=SECONDS + 60))
        me.mark("told")
    me.wait_for("told")
    dist.destroy_process_group()


def test_a_rank_that_leaves_after_the_timeout_of_a_message_is_not_blamed(run) -> None:
    for medium, started in run(leave_after_a_timeout, 3, ["shm"]).items():
        assert started[1].reported["ranks"] == [0], (medium, started[1].reported)
        assert started[2].reported["ranks"] == [0], (medium, started[2].reported)
        assert "because of it rank 1 (" in started[2].reported["text"]
