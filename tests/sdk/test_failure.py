"""What the others see when a rank fails, strays or leaves: ranks are processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.processes import Me, Ranks, on_ranks

import rankmesh as dist
from rankmesh._session.session import require_session
from rankmesh.multiprocessing import ProcessException, start_processes

pytestmark = pytest.mark.processes

TRANSPORTS = ("shm", "tcp")
SOON = 30.0
"""Seconds within which a failure must be known everywhere, on a busy machine too."""


def reduce_for_ever(count: int = 1000) -> None:
    """Go round in all_reduce until something happens."""
    array = np.ones(count)
    while True:
        dist.all_reduce(array)
        array[:] = 1


def reduce_until_killed(me: Me) -> None:
    me.init()
    dist.barrier()
    me.mark(f"going-{me.rank}")
    me.report(**me.attempt(reduce_for_ever, 400_000 if me.size == 4 else 1000))


@pytest.mark.parametrize(("medium", "size", "victim"), [("shm", 3, 1), ("tcp", 3, 1), ("aabb", 4, 2)])
def test_a_rank_that_is_killed_is_named_at_all_others_soon(
    ranks: Ranks, over: Callable, medium: str, size: int, victim: int
) -> None:
    started = ranks.start(reduce_until_killed, size, env=over(medium))
    ranks.wait_for(*(f"going-{rank}" for rank in range(size)))
    killed = started[victim].kill()
    ranks.wait(started)
    assert started[victim].code == -signal.SIGKILL
    for rank in (each for each in started if each is not started[victim]):
        assert rank.reported["error"] == "RankFailedError" or (
            medium == "aabb" and "GroupAbortedError" in rank.reported["is"]
        )
        assert rank.reported["ranks"] == [victim]
        assert f"pid {started[victim].process.pid}" in rank.reported["text"]
        assert "heartbeat" not in rank.reported["text"], "for one that is missing they would have waited"
        assert rank.reported["at"] - killed < SOON


def pass_on_for_ever(me: Me) -> None:
    """Send a large message to the next rank and receive one from the last, until something happens."""
    array, got = np.ones(8 << 20, np.float32), np.zeros(8 << 20, np.float32)
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    while True:
        sending = dist.isend(array, after)
        dist.recv(got, before)
        sending.wait()
        assert got.all()


def pass_on_until_killed(me: Me) -> None:
    me.init()
    dist.barrier()
    me.mark(f"going-{me.rank}")
    me.report(**me.attempt(pass_on_for_ever, me))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_killed_in_large_messages_is_named(ranks: Ranks, transport: str) -> None:
    started = ranks.start(pass_on_until_killed, 3, env={"RANKMESH_TRANSPORT": transport})
    ranks.wait_for(*(f"going-{rank}" for rank in range(3)))
    time.sleep(0.1)
    killed = started[1].kill()
    ranks.wait(started)
    for rank in (started[0], started[2]):
        assert rank.reported["error"] == "RankFailedError"
        assert rank.reported["ranks"] == [1]
        assert "heartbeat" not in rank.reported["text"]
        assert rank.reported["at"] - killed < SOON


def raise_at_rank_1(me: Me) -> None:
    me.init()
    dist.barrier()
    if me.rank == 1:
        raise ValueError("no such file: weights.npy")
    me.report(**me.attempt(dist.all_reduce, np.ones(3)))


def test_an_uncaught_exception_is_told_to_the_others(ranks: Ranks) -> None:
    started = ranks.start(raise_at_rank_1, 3)
    ranks.wait(started)
    assert started[1].code == 1
    for rank in (started[0], started[2]):
        assert rank.reported["error"] == "RankFailedError"
        assert rank.reported["ranks"] == [1]
        assert "ValueError: no such file: weights.npy" in rank.reported["text"]


@on_ranks(3)
def test_a_script_that_just_ends_ends_quietly(me: Me) -> None:
    me.init()
    array = np.ones(100_000)
    dist.all_reduce(array)
    time.sleep(0.05 * (me.size - me.rank))  # in any order


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


@on_ranks(2, env={"RANKMESH_TRANSPORT": "tcp"})
def test_a_forked_child_that_ends_does_not_say_goodbye_for_its_parent(me: Me) -> None:
    me.init()
    dist.barrier()
    if me.rank == 0:
        child = os.fork()
        if child == 0:
            sys.exit(0 if not dist.is_initialized() else 1)  # runs what is registered for the exit
        assert os.waitpid(child, 0)[1] == 0
    me.meet("forked")
    array = np.ones(5)
    dist.all_reduce(array)
    if me.rank == 0:
        dist.send(array, dst=1)
    else:
        dist.recv(array, src=0)
    dist.destroy_process_group()


def end_while_others_wait(me: Me, how: str) -> None:
    """Rank 0 ends while rank 1 waits for it."""
    me.init()
    dist.barrier()
    if me.rank:
        me.report(**me.attempt(dist.recv, np.zeros(1), 0))
        dist.destroy_process_group()
    elif how == "raise":
        raise ValueError("no such file: weights.npy")
    elif how == "destroy in finally":
        try:
            raise ValueError("no such file: weights.npy")
        finally:
            dist.destroy_process_group()
    elif how != "return":
        sys.exit(int(how))


def test_a_rank_replaces_neither_exit_nor_excepthook(alone: None) -> None:
    assert type(sys.exit).__name__ == "builtin_function_or_method"
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize(
    ("how", "code", "reported"),
    [
        ("raise", 1, "left (it ended with ValueError: no such file: weights.npy)"),
        ("destroy in finally", 1, "left (it called destroy_process_group after ValueError: no such file: weights.npy)"),
        ("3", 3, "left (it exited without destroy_process_group)"),
        ("return", 0, "left (it exited without destroy_process_group)"),
    ],
)
def test_a_rank_that_ends_is_named_with_how_it_ended(ranks: Ranks, how: str, code: int, reported: str) -> None:
    started = ranks.start(end_while_others_wait, 2, how=how)
    ranks.wait(started)
    assert [rank.code for rank in started] == [code, 0], ranks.transcript()
    assert started[1].reported["error"] == "RankFailedError"
    assert started[1].reported["ranks"] == [0]
    assert re.match(rf"rank 0 \(\S+, pid \d+\) {re.escape(reported)} ", started[1].reported["text"])


def end_because_of_a_death(me: Me, how: str) -> None:
    """Rank 2 is killed; rank 0 ends because of it; rank 1 waits for rank 0 in groups without rank 2."""
    me.init()
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 3])
    dist.barrier()
    me.mark(f"going-{me.rank}")
    if me.rank == 1:
        me.report(**me.attempt(dist.all_reduce, np.ones(1), group=pair))
        dist.destroy_process_group()
    elif me.rank == 3:
        me.report(**me.attempt(dist.recv, np.ones(1), 1, group=other))
        dist.destroy_process_group()
    elif me.rank == 2:
        time.sleep(SOON)
    elif how == "raise":
        dist.recv(np.ones(1), 2)
    else:
        me.attempt(dist.recv, np.ones(1), 2)
        dist.destroy_process_group()


@pytest.mark.parametrize(("transport", "how"), [("tcp", "raise"), ("shm", "destroy")])
def test_the_first_failure_is_named_by_those_who_wait_for_its_victims(ranks: Ranks, transport: str, how: str) -> None:
    started = ranks.start(end_because_of_a_death, 4, how=how, env={"RANKMESH_TRANSPORT": transport})
    ranks.wait_for(*(f"going-{rank}" for rank in range(4)))
    time.sleep(0.1)
    killed = started[2].kill()
    ranks.wait(started)
    assert [rank.code for rank in started] == [1 if how == "raise" else 0, 0, -signal.SIGKILL, 0]
    for victim, waiting in (0, started[1]), (1, started[3]):
        reported = waiting.reported
        assert (reported["error"], reported["ranks"]) == ("RankFailedError", [2]), reported
        assert re.match(r"rank 2 \(\S+, pid \d+\) failed \(", reported["text"])
        # After the last call: it may leave before the waiting rank, which is slow, has begun its own call.
        assert re.search(rf"; because of it rank {victim} \(\S+, pid \d+\) left (during|after) ", reported["text"])
        assert reported["at"] - killed < SOON


def end_because_of_a_misfit(me: Me) -> None:
    """Rank 1 ends because of what rank 0 sends, a long message, and rank 0 goes on; rank 2 waits for rank 1."""
    me.init()
    dist.barrier()
    if me.rank == 0:
        assert me.attempt(dist.send, np.ones(100_000), 1)["error"] == "DistBackendError"
        me.wait_for("reported")
    elif me.rank == 1:
        try:
            dist.recv(np.ones(100_000, np.float32), 0)
        except dist.DistBackendError as error:
            me.report(ranks=list(error.ranks))
            raise
    else:
        me.report(**me.attempt(dist.recv, np.ones(1), 1), failed=require_session().agent.failed_ranks)
        me.mark("reported")
    dist.destroy_process_group()


def test_errors_name_the_rank_that_has_left_and_not_one_whose_message_did_not_fit(ranks: Ranks) -> None:
    started = ranks.start(end_because_of_a_misfit, 3, env={"RANKMESH_TRANSPORT": "tcp"})
    ranks.wait(started)
    assert [rank.code for rank in started] == [0, 1, 0], ranks.transcript()
    assert started[1].reported["ranks"] == []
    reported = started[2].reported
    assert (reported["error"], reported["ranks"]) == ("RankFailedError", [1]), reported
    assert re.match(r"rank 1 \(\S+, pid \d+\) left \(it ended with DistBackendError: rank 0 sent", reported["text"])
    assert reported["failed"] == [1]


def leave_after_a_timeout(me: Me, polls: bool) -> None:
    """Rank 0's receive from rank 2 expires; it goes on if it only polls, otherwise it leaves."""
    me.init()
    dist.barrier()
    if me.rank == 0:
        me.report(**me.attempt(dist.recv, np.ones(1), 2, timeout=0.2))
        if polls:
            dist.send(np.ones(1), 1)
    if me.rank == 1:
        me.report(**me.attempt(dist.recv, np.ones(1), 0))
        if not polls:
            me.mark("reported")
    if polls:
        dist.barrier()
    elif me.rank == 2:
        me.wait_for("reported")
    dist.destroy_process_group()


@pytest.mark.parametrize("polls", [True, False])
def test_a_receive_that_expires_is_told_by_a_rank_that_leaves_after_it(ranks: Ranks, polls: bool) -> None:
    started = ranks.run(leave_after_a_timeout, 3, polls=polls)
    assert started[0].reported["error"] == "CollectiveTimeoutError"
    if polls:
        assert started[1].reported["error"] is None
    else:
        assert (started[1].reported["error"], started[1].reported["ranks"]) == ("RankFailedError", [0])
        assert " left (after CollectiveTimeoutError: recv from rank 2 (tag 0) in " in started[1].reported["text"]


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
