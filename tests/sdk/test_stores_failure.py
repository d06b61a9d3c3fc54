"""Waits for keys end when no rank is left that could set them; support/failures.py has the other ends."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.processes import on_ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def survivors_run(ranks, body, size, **options):
    """Run ranks of which the last dies by its own hand."""
    started = ranks.start(body, size, **options)
    ranks.wait(started)
    assert [rank.code for rank in started[:-1]] == [0] * (size - 1), ranks.transcript()
    assert started[-1].code == -signal.SIGKILL, ranks.transcript()


@on_ranks(4, run=survivors_run)
def test_after_a_shrink_the_new_world_counts(me):
    me.init(timeout=170.0)
    store = dist.get_default_store()
    dist.barrier()
    if me.rank == 2:
        me.wait_for("over")  # it is excluded, and leaves in the middle of a wait of the others, which goes on
        dist.destroy_process_group()
        return
    shrunk = dist.shrink_group([2])
    me.mark(f"begins-{me.rank}")
    if me.rank == 0:
        me.wait_for("begins-0", "begins-1", "begins-3")
        me.mark("over")
        time.sleep(1.0)
        store.set("go", "1")
    assert store.get("go") == b"1"
    dist.barrier()
    if me.rank == 3:
        me.wait_for("waits-0", "waits-1")
        os.kill(os.getpid(), signal.SIGKILL)
    me.mark_when_waiting(f"waits-{me.rank}")
    caught = me.attempt(store.get, "missing")
    assert (caught["error"], caught["ranks"]) == ("RankFailedError", [2]), caught  # its number in the shrunken world
    assert "'missing'" in caught["text"]
    assert shrunk.size() == 3
    dist.destroy_process_group()


@on_ranks(3)
def test_a_wait_ends_with_the_world(me):
    """Rank 1 gives up a collective, and lives."""
    me.init(timeout=170.0)
    store = dist.get_default_store()
    dist.barrier()
    if me.rank == 1:
        me.wait_for("waits-0", "waits-2")
        caught = me.attempt(dist.monitored_barrier, timeout=0.1)
        assert caught["error"] == "CollectiveTimeoutError", caught
        assert me.attempt(dist.all_reduce, np.ones(1), timeout=0.1)["error"] == "CollectiveTimeoutError"
        me.wait_for("ended-0", "ended-2")
    else:
        me.mark_when_waiting(f"waits-{me.rank}")
        caught = me.attempt(store.get, "missing")
        assert caught["error"] == "RankFailedError", caught
        assert "rank 1 (" in caught["text"]
        assert caught["seconds"] < 30
        me.mark(f"ended-{me.rank}")
        store.set(f"alive/{me.rank}", "1")
        store.wait(["alive/0", "alive/2"])
    dist.destroy_process_group()


@on_ranks(2)
def test_a_wait_ends_when_no_other_rank_is_left(me):
    me.init(timeout=170.0)
    store = dist.get_default_store()
    store.set("there", "1")
    dist.barrier()
    if me.rank == 1:
        me.wait_for("waits-0")
        dist.destroy_process_group()
        return
    me.mark_when_waiting("waits-0")
    for call in (store.get, store.queue_pop):  # under way, and begun afterwards
        caught = me.attempt(call, "missing")
        assert (caught["error"], caught["ranks"]) == ("StoreTimeoutError", [1]), caught
        assert "no other rank is left" in caught["text"]
        assert caught["seconds"] < 30
    assert me.attempt(store.queue_pop, "missing", block=False)["error"] == "QueueEmptyError"
    assert store.get("there") == b"1"
    dist.destroy_process_group()


def test_a_job_of_one_rank_waits(alone):
    """Another thread may set the key."""
    store = dist.get_default_store()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "k")
        time.sleep(0.1)
        dist.get_default_store().set("k", "1")
        assert waiting.result(30) == b"1"
    with pytest.raises(dist.errors.StoreTimeoutError, match="'none'"):
        store.wait(["none"], 0.1)
