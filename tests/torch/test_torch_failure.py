"""What torch's users see when a rank of a group over the mesh dies or stays away: ranks are processes."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, Ranks, on_ranks, wait_until

import rankmesh
import rankmesh.torch as mesh

pytestmark = pytest.mark.processes

CALLS = ("backward", "wait", "future", "chain", "message", "call")


def join(me: Me) -> None:
    """Make torch's default group over the mesh."""
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/store", rank=me.rank, world_size=me.size)


def wait_in_all_ways(me: Me) -> None:
    """All but rank 1 wait for it: in a Work, a future, what follows one, a message, a call, and in backward()."""
    join(me)
    groups = [c10d.new_group() for _ in range(5)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups[0])
    loss = model(torch.ones(2, 4)).sum()
    c10d.barrier()
    me.mark(f"there-{me.rank}")
    if me.rank == 1:
        me.wait_for("never")
    tensors = torch.ones(4, 3)
    work = c10d.all_reduce(tensors[0], group=groups[1], async_op=True)
    future = c10d.all_reduce(tensors[1], group=groups[2], async_op=True).get_future()
    chain = c10d.all_reduce(tensors[2], group=groups[3], async_op=True).get_future().then(lambda done: done.value())
    message = c10d.irecv(tensors[3], src=1, group=groups[4])
    me.mark(f"waiting-{me.rank}")
    found = {
        "backward": me.attempt(loss.backward),
        "wait": me.attempt(work.wait),
        "future": me.attempt(future.wait),
        "chain": me.attempt(chain.wait),
        "message": me.attempt(message.wait),
        "call": me.attempt(c10d.all_reduce, torch.ones(3)),
    }
    me.report(**found, failed=[work.is_completed(), work.is_success(), type(work.exception()).__name__])
    c10d.destroy_process_group()


def test_a_killed_rank_is_named_wherever_the_others_wait(ranks: Ranks) -> None:
    started = ranks.start(wait_in_all_ways, 3)
    ranks.wait_for("there-1", "waiting-0", "waiting-2")
    started[1].kill()
    ranks.wait(started)
    assert started[1].code == -signal.SIGKILL
    for rank in (started[0], started[2]):
        assert rank.code == 0, ranks.transcript()
        for call in CALLS:
            reported = rank.reported[call]
            assert "rank 1" in reported["text"], (call, reported)
            assert "RuntimeError" in reported["is"], (call, reported)
        for call in ("wait", "message", "call"):
            assert rank.reported[call]["error"] == "RankFailedError", ranks.transcript()
            assert rank.reported[call]["ranks"] == [1]
            assert rank.reported[call]["is"].count("DistBackendError") == 2  # RankMesh's and torch's
        for call in ("backward", "future", "chain"):  # torch's C++ passes on what the error says
            assert "RankFailedError" in rank.reported[call]["text"] or rank.reported[call]["error"] == "RankFailedError"
        assert rank.reported["failed"] == [True, False, "RankFailedError"]


@on_ranks(3)
def test_a_rank_that_stays_away_is_named(me: Me) -> None:
    """Rank 1 makes none of the calls that the others wait for."""
    join(me)
    ones = torch.ones(2)
    soon = timedelta(seconds=5)  # making a group may take as long, too
    c10d.barrier()
    groups = [c10d.new_group(timeout=timeout) for timeout in (soon, soon, None, None)]
    groups[2].set_timeout(soon)
    monitored = c10d.new_group()
    if me.rank != 1:
        work = c10d.all_reduce(ones, group=groups[1], async_op=True)
        calls = (
            lambda: c10d.all_reduce(torch.ones(2), group=groups[0]),
            work.wait,
            lambda: c10d.broadcast(torch.ones(2), 0, group=groups[2]),
            lambda: mesh.monitored_barrier(monitored, timeout=soon),
            lambda: groups[3].monitored_barrier(soon, True),
        )
        with ThreadPoolExecutor(len(calls)) as threads:  # in groups of their own
            errors = [call.exception(60) for call in [threads.submit(call) for call in calls]]
        for error in errors:
            assert isinstance(error, rankmesh.CollectiveTimeoutError | rankmesh.GroupAbortedError), errors
            assert isinstance(error, c10d.DistBackendError)
            assert list(error.ranks) == [1]
    me.meet("given up")
    c10d.destroy_process_group()


@on_ranks(2)
def test_a_group_can_be_aborted_and_left(me: Me) -> None:
    """One member aborts a group; another group is left by all, while a call is under way."""
    join(me)
    group, other = c10d.new_group(), c10d.new_group()
    waiting = c10d.all_reduce(torch.ones(1), group=other, async_op=True) if me.rank == 0 else None
    c10d.barrier()
    if me.rank == 1:
        group.abort()
    with pytest.raises(rankmesh.GroupAbortedError, match=r"abort\(\)"):
        c10d.all_reduce(torch.ones(1), group=group)
    c10d.barrier()  # the default group goes on
    if waiting is not None:
        c10d.destroy_process_group(other)
        with pytest.raises(c10d.DistBackendError):
            waiting.wait()
    me.meet("left")
    c10d.destroy_process_group()
    wait_until(lambda: not any(name.startswith("rankmesh") for name in me.resources()[0]), "our threads to end", 30)


def end_with_an_error(me: Me) -> None:
    """Rank 1 ends by an exception while a callback's thread of it waits for rank 0, which waits for rank 1."""
    join(me)
    c10d.barrier()
    if me.rank == 1:
        c10d.irecv(torch.ones(1), src=0).get_future().then(lambda done: done.value())
        raise ValueError("no such file: weights.npy")
    me.report(**me.attempt(c10d.all_reduce, torch.ones(1)))
    c10d.destroy_process_group()


def test_a_rank_that_waits_in_a_future_ends_by_its_error(ranks: Ranks) -> None:
    started = ranks.start(end_with_an_error, 2)
    ranks.wait(started)
    assert started[1].code == 1, ranks.transcript()
    assert started[0].reported["error"] == "RankFailedError"
    assert "ValueError: no such file: weights.npy" in started[0].reported["text"]
