"""Worlds that grow: new ranks join a running job, also in place of those that were killed."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import meetings
from support.hosting import embedded_only
from support.processes import Me, Ranks, on_ranks

import rankmesh as dist


def check_world(size: int) -> None:
    """Collectives, messages and objects of the world are right."""
    assert (dist.get_world_size(), dist.get_pg_count()) == (size, 1)
    meetings.check_world()
    objects = [None] * size
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == list(range(size))


@pytest.mark.parametrize(("transport", "waiting_first"), [("shm", False), ("tcp", True)])
@on_ranks(5, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_new_ranks_come_behind_the_others_and_find_the_store(me: Me, waiting_first: bool) -> None:
    if me.rank >= 3:
        me.wait_for(*(f"growing-{rank}" for rank in range(3) if not waiting_first))
        me.mark(f"joining-{me.rank}")
        me.join()
        assert dist.get_rank() >= 3
    else:
        me.init(world_size=3)
        store, world, pair = dist.get_default_store(), dist.group.WORLD, dist.new_group([0, 1])
        clone = store.clone()
        if me.rank == 1:
            store.set("text", "kept")
            store.add("count", 5)
            store.set("large", b"x" * 3_000_000)
            for each in ("first", "second"):
                store.queue_push("queue", each)
        dist.barrier()
        if waiting_first:
            me.wait_for("joining-3", "joining-4")
        me.mark(f"growing-{me.rank}")
        assert dist.grow_group(world_size=5) is dist.group.WORLD is not world
        assert dist.get_rank() == me.rank
        assert me.attempt(dist.barrier, world)["error"] == "GroupAbortedError"
        if me.rank < 2:
            assert me.attempt(dist.barrier, pair)["error"] == "GroupAbortedError"
        assert store.get("text") == clone.get("text") == b"kept"
    check_world(5)
    store = dist.get_default_store()
    assert store.get("text") == b"kept"
    assert store.get("large") == b"x" * 3_000_000
    dist.barrier()
    if me.rank == 4:
        assert store.add("count", 2) == 7
        assert [store.queue_pop("queue"), store.queue_pop("queue")] == [b"first", b"second"]
        assert store.num_keys() == 3
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(4)
def test_without_a_size_the_world_grows_by_all_that_wait(me: Me) -> None:
    if me.rank >= 2:
        me.wait_for("none")
        me.join()
    else:
        me.init(world_size=2)
        assert dist.grow_group() is dist.group.WORLD
        assert dist.grow_group(2).size() == 2
        me.mark("none")
        while dist.get_world_size() < 4:
            dist.grow_group()
    if dist.get_world_size() == 3:  # one came before the other
        while dist.get_world_size() < 4:
            dist.grow_group()
    check_world(4)
    dist.destroy_process_group()


def lose_and_regain(me: Me) -> None:
    """Rank 2 of 3 is killed; who waits takes its place, and is the next to be killed."""
    if me.rank >= 3:
        me.wait_for(f"killed-{me.rank - 1}")
        me.join()
        check_world(3)
    else:
        me.init(world_size=3)
    generation = max(me.rank, 2)
    while generation < me.size:
        if dist.get_rank() == 0:
            me.mark(f"going-{generation}")
        error = me.attempt(reduce_for_ever)
        assert error["error"] == "RankFailedError", error
        assert error["ranks"] == [2], error
        dist.shrink_group([2])
        check_world(2)
        generation += 1
        if generation < me.size:
            dist.grow_group(world_size=3, timeout=60)
            check_world(3)
    dist.destroy_process_group()


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(np.ones(1000))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank_is_replaced_again_and_again(ranks: Ranks, transport: str) -> None:
    size = 5
    started = ranks.start(lose_and_regain, size, env={"RANKMESH_TRANSPORT": transport})
    for victim in range(2, size):
        ranks.wait_for(f"going-{victim}")
        time.sleep(0.05)  # into the calls
        started[victim].kill()
        started[victim].process.wait()
        ranks.mark(f"killed-{victim}")
    ranks.succeed(started[:2])


def grow_after_the_death_of_rank_0(me: Me) -> None:
    if me.rank == 3:
        me.wait_for("killed")
        me.join()
    else:
        me.init(world_size=3)
        store = dist.get_default_store()
        if me.rank == 0:
            store.set("key", "value")
            store.queue_push("queue", "first")
        dist.barrier()
        me.mark(f"set-{me.rank}")
        error = me.attempt(reduce_for_ever)
        assert error["ranks"] == [0], error
        dist.shrink_group([0])
        dist.grow_group(3)
    store = dist.get_default_store()
    assert store.num_keys() == 1
    assert store.get("key") == b"value"
    dist.barrier()
    if dist.get_rank() == 2:
        assert store.queue_pop("queue") == b"first"
    check_world(3)
    dist.destroy_process_group()


def test_the_world_grows_after_the_death_of_rank_0_and_has_the_same_store(ranks: Ranks) -> None:
    started = ranks.start(grow_after_the_death_of_rank_0, 4)
    ranks.wait_for("set-0", "set-1", "set-2")
    started[0].kill()
    started[0].process.wait()
    ranks.mark("killed")
    ranks.succeed(started[1:])


def attempt_until(fits: Callable[[dict[str, Any]], bool], attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Repeat an attempt with a short time limit, in which a rank or the gateway may be late, until its error fits."""
    for _ in range(20):
        reported = attempt()
        if fits(reported):
            break
    return reported


def is_join_timeout(reported: dict[str, Any]) -> bool:
    return reported["error"] == "JoinTimeoutError"  # not that of a gateway that did not answer in time


def agents_threads() -> list[str]:
    """Names of the threads that each agent has."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("rankmesh-heartbeat", "rankmesh-http"))]


@on_ranks(4)
def test_a_growth_that_fails_leaves_the_world_as_it_was(me: Me) -> None:
    if me.rank == 3:
        me.wait_for("again")
        me.join()
    else:
        me.init(world_size=3)
        group, store = dist.new_group([0, 2]), dist.get_default_store()
        store.set("key", "value")
        threads = len(agents_threads())

        def all_have_called(reported: dict[str, Any]) -> bool:
            absent: list[Any] = [None] * 3
            dist.all_gather_object(absent, reported["ranks"])
            return absent == [[3]] * 3

        told = attempt_until(all_have_called, lambda: me.attempt(dist.grow_group, 4, timeout=1.0))
        assert told["error"] == "JoinTimeoutError", told
        assert f"rank {me.rank} waited 1.0 s for rank 3 of job" in told["text"], told
        assert told["ranks"] == [3]
        if me.rank != 1:
            dist.barrier(group)
        dist.barrier()
        assert store.get("key") == b"value"
        assert len(agents_threads()) == threads
        # One rank alone does not grow a world.
        if me.rank == 0:
            told = attempt_until(is_join_timeout, lambda: me.attempt(dist.grow_group, 4, timeout=0.5))
            assert told["ranks"] == [1, 2], told
            assert "waited 0.5 s for ranks 1, 2, which have not called grow_group(), of job" in told["text"], told
        dist.barrier()
        me.mark("again")
        dist.grow_group(4)
    check_world(4)
    dist.destroy_process_group()


@on_ranks(3)
def test_ranks_that_call_for_different_sizes_are_told_so(me: Me) -> None:
    me.init()
    errors: list[Any] = [None] * 3

    def all_have_called(reported: dict[str, Any]) -> bool:
        dist.all_gather_object(errors, reported["error"])
        return "WorldSizeMismatchError" in errors and set(errors) <= {"WorldSizeMismatchError", "JoinTimeoutError"}

    attempt_until(all_have_called, lambda: me.attempt(dist.grow_group, 4 if me.rank else 5, timeout=2.0))
    assert "WorldSizeMismatchError" in errors
    assert set(errors) <= {"WorldSizeMismatchError", "JoinTimeoutError"}
    dist.destroy_process_group()


def die_while_the_others_grow(me: Me) -> None:
    me.init()
    if me.rank == 2:
        me.mark("here")
        signal.pause()
    dist.barrier(dist.new_group([0, 1]))
    me.mark(f"growing-{me.rank}")
    told = me.attempt(dist.grow_group, 4, timeout=60)
    assert told["error"] == "RankFailedError", told
    assert told["ranks"] == [2], told
    assert "rank 2" in told["text"], told
    me.report(at=told["at"])
    dist.shrink_group([2])
    check_world(2)
    dist.destroy_process_group()


def test_a_rank_that_dies_meanwhile_is_named_at_once(ranks: Ranks) -> None:
    started = ranks.start(die_while_the_others_grow, 3)
    ranks.wait_for("here", "growing-0", "growing-1")
    time.sleep(0.3)
    killed_at = started[2].kill()
    ranks.succeed(started[:2])
    assert max(rank.reported["at"] for rank in started[:2]) - killed_at < 20


@on_ranks(2)
def test_ctrl_c_ends_the_wait_and_the_world_goes_on(me: Me) -> None:
    me.init()
    if me.rank == 0:
        me.interrupt_when_waiting()
        told = me.attempt(dist.grow_group, 3, timeout=60)
        assert told["error"] == "KeyboardInterrupt", told
        me.mark("interrupted")
    else:
        told = me.attempt(dist.grow_group, 3, timeout=4)
        assert told["error"] == "JoinTimeoutError", told
    check_world(2)
    dist.destroy_process_group()


@on_ranks(3)
def test_processes_that_wait_in_vain_are_told_so(me: Me) -> None:
    if me.rank == 2:
        me.wait_for("formed")
        told = attempt_until(is_join_timeout, lambda: me.attempt(me.join, timeout=1.5))
        assert told["error"] == "JoinTimeoutError", told
        assert "s for the ranks of job" in told["text"], told
        assert "to call grow_group()" in told["text"], told
        assert not dist.is_initialized()
        me.mark("told")
        return
    me.init(world_size=2)
    dist.barrier()
    me.mark("formed")
    me.wait_for("told")
    assert dist.grow_group().size() == 2
    dist.destroy_process_group()


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"rank": 1}, ValueError, "leave out rank=1"),
            ({"world_size": 4}, ValueError, "leave out world_size=4"),
            ({"init_method": "tcp://127.0.0.1:1?rank=0"}, ValueError, "leave out rank=0"),
            ({"init_method": None, "store": object()}, ValueError, "give its address as the init_method, no store"),
            ({"init_method": 5}, TypeError, "init_method must be a URL"),
            ({"init_method": "gopher://x"}, ValueError, "is not known"),
        ],
    )
    def test_of_a_process_that_awaits_the_growth(self, arguments, error, text):
        with pytest.raises(error, match=text):
            dist.init_process_group(**{"init_method": "tcp://127.0.0.1:1", "join": True, **arguments})

    def test_without_a_world(self):
        for call in (dist.grow_group, lambda: dist.on_failure(print)):
            with pytest.raises(ValueError, match="has not been initialized"):
                call()

    def test_the_launchers_variable(self, monkeypatch):
        monkeypatch.setenv("RANKMESH_JOIN", "1")
        with pytest.raises(ValueError, match="leave out rank=0"):
            dist.init_process_group(init_method="tcp://127.0.0.1:1", rank=0)


@on_ranks(2)
def test_arguments_of_a_growth(me: Me) -> None:
    me.init()
    for wanted, error, text in [
        (1, "ValueError", "shrink_group makes it smaller"),
        (65_537, "ValueError", "may have 65536"),
        ("3", "TypeError", "world_size"),
        (2.0, "TypeError", "world_size"),
    ]:
        told = me.attempt(dist.grow_group, wanted)
        assert told["error"] == error, told
        assert text in told["text"], told
    assert me.attempt(dist.on_failure, None)["error"] == "TypeError"
    dist.destroy_process_group()


def unnumbered(me: Me) -> tuple[list[str], dict[str, int]]:
    """The threads and descriptors, whose names are of this epoch, without these names."""
    threads, descriptors = me.resources()
    kinds: Counter[str] = Counter()
    for name, count in descriptors.items():
        kinds[re.sub(r"store-\w+", "store", name)] += count
    return [re.sub(r"\d+", "", name) for name in threads], kinds


@embedded_only("an attached process has its threads and descriptors for the agent, not for its peers")
@on_ranks(4)
def test_nothing_is_left_of_the_worlds_before(me: Me) -> None:
    for turn in range(4):
        if me.rank == 3:
            me.join()
        else:
            if turn == 0:
                me.init(world_size=3)
            dist.grow_group(4)
        check_world(4)
        if turn == 1:
            before = unnumbered(me)
        if turn == 3:
            assert unnumbered(me) == before
        dist.barrier()
        if me.rank == 3:
            dist.destroy_process_group()
        else:
            dist.shrink_group([3])
            dist.barrier()
    if me.rank != 3:
        dist.destroy_process_group()


def call_back(me: Me) -> None:
    me.init()
    errors: list[dist.DistBackendError] = []
    removed: list[object] = []

    def fail(error: dist.DistBackendError) -> None:
        raise RuntimeError("the user's own")

    handle = dist.on_failure(removed.append)
    dist.on_failure(fail)
    dist.on_failure(errors.append)
    handle.remove()
    handle.remove()
    if me.rank == 1:
        dist.barrier()
        dist.destroy_process_group()  # in order: no failure
        return
    dist.barrier()
    me.mark(f"computing-{me.rank}")
    if me.rank == 2:
        signal.pause()
    until = time.monotonic() + 60
    while not errors:
        assert time.monotonic() < until
        sum(range(1000))
    time.sleep(0.3)
    assert [type(error).__name__ for error in errors] == ["RankFailedError"]
    assert errors[0].ranks == (2,)
    assert not removed
    late: list[dist.DistBackendError] = []
    dist.on_failure(late.append)
    dist.destroy_process_group()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "rankmesh-failures"]


def test_callbacks_are_called_while_the_rank_computes(ranks: Ranks) -> None:
    started = ranks.start(call_back, 4)
    ranks.wait_for("computing-0", "computing-2", "computing-3")
    started[2].kill()
    ranks.wait([started[0], started[1], started[3]])
    for rank in (started[0], started[3]):
        assert rank.code == 0, rank
        assert "RuntimeError: the user's own" in rank.stderr


def call_back_after_growth(me: Me) -> None:
    if me.rank == 2:
        me.join()
        me.mark("joined")
        signal.pause()
    me.init(world_size=2)
    errors: list[dist.DistBackendError] = []
    dist.on_failure(errors.append)
    dist.grow_group(3)
    me.mark(f"grown-{me.rank}")
    until = time.monotonic() + 60
    while not errors:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert errors[0].ranks == (2,)
    dist.shrink_group([2])
    dist.destroy_process_group()


def test_callbacks_follow_the_world(ranks: Ranks) -> None:
    started = ranks.start(call_back_after_growth, 3)
    ranks.wait_for("joined", "grown-0", "grown-1")
    started[2].kill()
    ranks.succeed(started[:2])
