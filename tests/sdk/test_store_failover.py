"""The job's store survives its owner: ranks are processes, and the first ones are killed, or leave."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support import hosting
from support.processes import Me, Ranks, on_ranks, wait_until
from support.slow_ranks import allow_slow_ranks

import rankmesh as dist


def hosts_of(ranks: Ranks, hosts: str, **variables: str) -> Callable[[int], dict[str, str]]:
    """Return the variables of each rank; ``hosts`` has a character for each rank, its host's name.

    Ranks with different RANKMESH_SHM_DIR share no memory, as if they were on several hosts.
    """
    if hosting.ATTACHED and len(set(hosts)) > 1:
        pytest.skip("the agents of a cluster share one directory")
    for host in hosts:
        (ranks.folder / f"host-{host}").mkdir(exist_ok=True)
    return lambda rank: {"RANKMESH_SHM_DIR": str(ranks.folder / f"host-{hosts[rank]}"), **variables}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survive(me: Me) -> None:
    """Each rank in turn writes and is killed; the others read what it has written."""
    allow_slow_ranks()
    me.init()
    store = dist.get_default_store()
    dist.barrier()
    me.meet("joined")  # on several hosts, a barrier is over for some ranks while others need one of these
    for victim in range(me.size - 1):
        if me.rank == victim:
            store.set(f"by-{victim}", str(victim))
            store.add("sum", 10**victim)
            store.append("text", chr(ord("a") + victim))
            store.queue_push("queue", str(victim))
            store.set("large", bytes([victim]) * (3 << 20))
            me.mark(f"dies-{victim}")
            die()
        me.wait_for(f"dies-{victim}")
        assert store.get("sum") == b"1" * (victim + 1)
        assert store.get(f"by-{victim}") == str(victim).encode()
        assert store.queue_len("queue") == victim + 1
        assert store.get("large") == bytes([victim]) * (3 << 20)
        me.mark(f"read-{victim}-{me.rank}")
        me.wait_for(*(f"read-{victim}-{rank}" for rank in range(victim + 1, me.size)))
    assert store.get("text") == b"abc"
    assert [store.queue_pop("queue") for _ in range(3)] == [b"0", b"1", b"2"]
    assert store.num_keys() == 6
    me.report(survived=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "transport"),
    [("aaaa", "shm"), ("aaaa", "tcp"), ("aabb", "auto"), ("abcd", "auto"), ("abab", "auto"), ("abbb", "auto")],
)
def test_it_survives_all_ranks_but_one(ranks: Ranks, hosts: str, transport: str) -> None:
    started = ranks.start(survive, 4, env=hosts_of(ranks, hosts, RANKMESH_TRANSPORT=transport))
    ranks.wait(started[3:])
    assert started[3].reported == {"survived": True}, started


def outlast(me: Me) -> None:
    allow_slow_ranks()
    me.init()
    store = dist.get_default_store()
    store.add("sum", 1)
    dist.barrier()
    if me.rank == 0:
        dist.destroy_process_group()
        me.mark("left")
        return
    me.wait_for("left")
    store.add("sum", 10)
    store.set(f"done-{me.rank}", "")
    store.wait(["done-1", "done-2"])
    assert store.get("sum") == b"23"
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("hosts", ["aaa", "abb", "abc"])
def test_it_survives_an_owner_that_leaves_in_order(ranks: Ranks, hosts: str) -> None:
    ranks.run(outlast, 3, env=hosts_of(ranks, hosts))


@on_ranks(3)
def test_it_survives_an_owner_that_is_shrunk_away(me: Me) -> None:
    me.init()
    store = dist.get_default_store()
    store.set("before", "kept")
    dist.barrier()
    if me.rank == 0:
        dist.destroy_process_group()
        return
    dist.shrink_group([0])
    assert dist.get_default_store().get("before") == b"kept"
    assert dist.get_default_store().add("after", 1) in (1, 2)
    dist.barrier()
    assert dist.get_default_store().get("after") == b"2"
    dist.destroy_process_group()


def go_on_without(me: Me) -> None:
    allow_slow_ranks()
    me.init()
    store = dist.get_default_store()
    store.add("sum", 1)
    dist.barrier()
    if me.rank == 0:
        me.mark("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(dist.DistNetworkError):  # where it learns only now that it is not the owner any more
            store.add("sum", 1000)
            me.mark("made")
        assert store.get("sum") == (b"1023" if (me.folder / "made").exists() else b"23")
        me.report(tried=True)
        me.wait_for("tried")
        os._exit(0)
    me.wait_for("stopped")
    dist.shrink_group([0])
    store = dist.get_default_store()
    store.add("sum", 10)
    dist.barrier()
    assert store.get("sum") == b"23"
    me.mark(f"shrunk-{me.rank}")
    me.wait_for("tried")
    assert store.get("sum") == (b"1023" if (me.folder / "made").exists() else b"23")
    dist.barrier()
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("hosts", ["aaa", "abb"])
def test_an_excluded_owner_that_goes_on_asks_the_new_one(ranks: Ranks, hosts: str) -> None:
    """It was stopped while the others shrank the world."""
    started = ranks.start(go_on_without, 3, env=hosts_of(ranks, hosts))
    ranks.wait_for("shrunk-1", "shrunk-2")
    os.kill(started[0].pid, signal.SIGCONT)
    wait_until(lambda: started[0].reported, "the excluded rank's call")
    ranks.mark("tried")
    ranks.wait(started)
    assert [each.code for each in started] == [0, 0, 0], ranks.transcript()


def wait_on(me: Me) -> None:
    me.init()
    store = dist.get_default_store()
    dist.barrier()
    if me.rank == 0:
        me.wait_for("waiting")
        die()
    waits: dict[str, Any] = {}
    if me.rank == 1:
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: store.get("key"),
            "pop": lambda: store.queue_pop("queue"),
            "wait": lambda: store.wait(["key"]),
        }

        def call(name: str) -> None:
            with pytest.raises(dist.RankFailedError) as caught:  # the world has failed
                calls[name]()
            assert caught.value.ranks == (0,)
            me.mark(f"failed-{name}")
            waits[name] = calls[name]()

        threads = [threading.Thread(target=call, args=[name]) for name in calls]
        me.mark_when_waiting("waiting", len(threads))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert waits == {"get": b"value", "pop": b"popped", "wait": None}
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=0.5))
        assert time.monotonic() - began < 30
    else:
        me.wait_for("failed-get", "failed-pop", "failed-wait")
        time.sleep(0.3)  # the calls wait again
        store.queue_push("queue", "popped")
        store.set("key", "value")
    me.report(rank=me.rank)


@pytest.mark.processes
def test_blocked_calls_end_and_wait_at_the_next_owner_when_repeated(ranks: Ranks) -> None:
    started = ranks.start(wait_on, 3)
    ranks.wait(started[1:])
    assert [each.reported for each in started[1:]] == [{"rank": 1}, {"rank": 2}]
