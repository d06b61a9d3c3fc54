"""Waits for keys of the job's store end when a rank fails, and not because it has failed before."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.processes import DEADLINE, on_ranks

import rankmesh as dist
from rankmesh._session.session import require_session

pytestmark = pytest.mark.processes


def survivors_run(ranks, body, size, **options):
    """Run ranks of which the last dies by its own hand."""
    started = ranks.start(body, size, **options)
    ranks.wait(started)
    assert [rank.code for rank in started[:-1]] == [0] * (size - 1), ranks.transcript()
    assert started[-1].code == -signal.SIGKILL, ranks.transcript()


def die_when_all_wait(me):
    me.wait_for(*(f"waits-{rank}" for rank in range(me.size - 1)))
    os.kill(os.getpid(), signal.SIGKILL)


def failed(me, caught, rank):
    """Check the error of a wait that the death of a rank ended."""
    assert caught["error"] == "RankFailedError", caught
    assert caught["ranks"] == [rank], caught
    assert f"rank {rank} (" in caught["text"]
    assert "'missing'" in caught["text"]
    return True


CALLS = {
    "wait": lambda store: store.wait(["there", "missing"], 170.0),
    "queue_pop": lambda store: store.queue_pop("missing"),
}


@pytest.mark.parametrize("call", ["wait", "queue_pop"])
@on_ranks(3, run=survivors_run)
def test_a_wait_ends_with_the_death_of_a_rank(me, call):
    me.init(timeout=170.0)
    store = dist.get_default_store()
    store.set("there", "1")
    dist.barrier()
    if me.rank == 2:
        die_when_all_wait(me)
    me.mark_when_waiting(f"waits-{me.rank}")
    caught = me.attempt(CALLS[call], store)
    failed(me, caught, 2)
    assert caught["seconds"] < 30
    # What survivors agree on afterwards comes to pass, at once and late.
    store.set(f"alive/{me.rank}", "1")
    store.wait(["alive/0", "alive/1"])
    if me.rank == 0:
        time.sleep(2.5)
        store.set("go", "1")
    assert store.get("go") == b"1"
    shrunk = dist.shrink_group([2])
    assert store.get("there") == b"1"
    store.set(f"shrunk/{me.rank}", "1")
    store.wait([f"shrunk/{rank}" for rank in range(shrunk.size())])
    dist.barrier()
    # Rank 1 leaves: then no rank is left that could set a key for rank 0.
    if me.rank == 0:
        me.mark("last")
        caught = me.attempt(store.get, "missing")
        assert (caught["error"], caught["ranks"]) == ("StoreTimeoutError", [1]), caught
        assert "rank 1 (" in caught["text"]
        assert caught["seconds"] < 30
        caught = me.attempt(store.queue_pop, "missing")
        assert (caught["error"], caught["seconds"] < 30) == ("StoreTimeoutError", True), caught
        assert me.attempt(store.queue_pop, "missing", block=False)["error"] == "QueueEmptyError"
        assert store.get("there") == b"1"
    else:
        me.wait_for("last")
        time.sleep(0.5)
    dist.destroy_process_group()


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
        die_when_all_wait_of(me, 0, 1)
    me.mark_when_waiting(f"waits-{me.rank}")
    caught = me.attempt(store.get, "missing")
    failed(me, caught, 2)  # its number in the shrunken world
    assert shrunk.size() == 3
    dist.destroy_process_group()


def die_when_all_wait_of(me, *ranks):
    me.wait_for(*(f"waits-{rank}" for rank in ranks))
    os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(3, run=survivors_run)
def test_over_http(me):
    """A GET with ?wait= at any agent ends, too."""
    me.init(timeout=170.0)
    dist.barrier()
    url = f"{require_session().agent.member.http}/v1/store/missing"

    def get(query):
        try:
            urllib.request.urlopen(f"{url}{query}", timeout=DEADLINE)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        raise AssertionError("it has a value")

    if me.rank == 2:
        die_when_all_wait(me)
    assert get("")[0] == 404  # the first request imports the framework
    me.mark_when_waiting(f"waits-{me.rank}")
    status, problem = get("?wait=20")
    assert (status, problem["code"], problem["ranks"]) == (503, "rank-failed", [2]), problem
    assert "'missing'" in problem["detail"]
    dist.get_default_store().set(f"over/{me.rank}", "1")
    dist.get_default_store().wait(["over/0", "over/1"])
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
