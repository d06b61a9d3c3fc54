"""Ranks that die, do not come or stray while arrays on GPUs are reduced: named, and the others' streams go on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.hosting import embedded_only
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

each_engine = pytest.mark.parametrize("engine", ["nccl", "cuda-ipc"])
SOON = 15.0
"""Seconds within which all has to be over on a machine that is busy."""


def killed(me: Me, backend: str | None) -> None:
    import cupy

    me.init(timeout=60, backend=backend)
    array = cupy.ones(1000)
    dist.all_reduce(array)
    assert float(array[0].get()) == me.size
    me.mark(f"ready-{me.rank}")
    if me.rank == 1:
        threading.Event().wait()
    with cupy.cuda.Stream(non_blocking=True) as stream:

        def call() -> None:
            work = dist.all_reduce(array, async_op=True)
            work.wait(60)

        told = me.attempt(call)
        stream.synchronize()  # goes on
        after = cupy.arange(10).sum().get()
    me.say(told=told, after=int(after), again=me.attempt(dist.all_reduce, array))
    dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
    other = cupy.full(10, me.rank + 1.0)
    dist.all_reduce(other)
    me.say(size=dist.get_world_size(), sum=float(other[0].get()))
    dist.destroy_process_group()


@embedded_only("whoever is killed is the agent's process")
@each_engine
def test_a_rank_that_is_killed_is_named_and_the_others_go_on(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 3)
    started = ranks.start(killed, 3, env=environment, backend=backend)
    ranks.wait_for("ready-0", "ready-1", "ready-2")
    at = started[1].kill()
    survivors = [started[0], started[2]]
    ranks.succeed(survivors)
    for rank in survivors:
        told = rank.said["told"]
        assert told["error"] == "RankFailedError", told
        assert told["ranks"] == [1]
        assert told["at"] - at < SOON
        assert rank.said["after"] == 45
        assert rank.said["again"]["ranks"] == [1]
        assert (rank.said["size"], rank.said["sum"]) == (2, 4.0)


def absent(me: Me, backend: str | None) -> None:
    """Rank 1 makes no call in time: of a group that has met before, and of one whose first call it is."""
    import cupy

    me.init(timeout=60, backend=backend)
    fresh, second = dist.new_group(timeout=2), dist.new_group()
    array = cupy.ones(100)
    dist.all_reduce(array)
    if me.rank == 0:
        me.say(first=me.attempt(dist.all_reduce, array, group=fresh))

        def call() -> None:
            dist.all_reduce(array, timeout=1)
            array.get()  # of NCCL's, the call is on the stream by now
            dist.all_reduce(array)

        me.say(told=me.attempt(call))
    me.meet("over")
    me.say(second=me.attempt(dist.all_reduce, cupy.ones(1), group=second))
    dist.destroy_process_group()


@each_engine
def test_a_rank_that_does_not_come_is_named(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    first, _ = (rank.said for rank in ranks.run(absent, 2, env=environment, backend=backend))
    for name in ("first", "told"):
        assert first[name]["error"] == "CollectiveTimeoutError", first[name]
        assert first[name]["ranks"] == [1]
        assert first[name]["seconds"] < SOON
    assert first["second"]["error"] is None


def astray(me: Me, backend: str | None) -> None:
    import cupy

    me.init(timeout=60, backend=backend)
    array = cupy.ones(100, np.float32)
    dist.all_reduce(array)

    def call() -> None:
        if me.rank:
            dist.all_reduce(array, dist.ReduceOp.MAX, timeout=3)
        else:
            dist.broadcast(array, 0, timeout=3)
        array.get()
        dist.barrier()

    me.say(told=me.attempt(call))
    dist.destroy_process_group()


@each_engine
def test_ranks_that_make_different_calls_are_told_which(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    for rank in ranks.run(astray, 2, env=environment, backend=backend):
        told = rank.said["told"]
        late = {"CollectiveTimeoutError", "GroupAbortedError"}  # one rank's time is over first, which tells the other
        assert told["error"] in ({"CollectiveMismatchError"} if engine == "cuda-ipc" else late), told
        assert "rank 0: broadcast" in told["text"]
        assert "rank 1: all_reduce" in told["text"]


def mixed(me: Me, backend: str | None) -> None:
    """One rank has its array on a GPU, the other one in host memory."""
    import cupy

    me.init(timeout=60, backend=backend)
    dist.all_reduce(cupy.ones(1))
    array = cupy.ones(10) if me.rank == 0 else np.ones(10)
    me.say(told=me.attempt(lambda: dist.all_reduce(array, timeout=3)))
    dist.destroy_process_group()


@each_engine
def test_a_rank_with_its_array_in_host_memory_is_named(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    on_gpu, on_host = (rank.said["told"] for rank in ranks.run(mixed, 2, env=environment, backend=backend))
    if engine == "cuda-ipc":
        for told in (on_gpu, on_host):
            assert told["error"] == "CollectiveMismatchError", told
            assert "rank 0: all_reduce(float64[10], SUM, on cuda); rank 1: all_reduce(float64[10], SUM)" in told["text"]
    else:  # the call is on the stream of rank 0; what waits for it is that of the others
        assert on_host["error"] in ("CollectiveTimeoutError", "GroupAbortedError"), on_host
        assert on_host["seconds"] < SOON
        assert on_host["ranks"]


def first_mixed(me: Me, backend: str | None) -> None:
    import cupy

    me.init(timeout=3, backend=backend)
    array = cupy.ones(10) if me.rank == 0 else np.ones(10)
    me.say(told=me.attempt(lambda: dist.all_reduce(array)))
    dist.destroy_process_group()


@each_engine
def test_a_rank_with_its_first_array_in_host_memory_is_named(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    for rank in ranks.run(first_mixed, 2, env=environment, backend=backend):
        told = rank.said["told"]
        assert told["error"] in ("CollectiveTimeoutError", "GroupAbortedError"), told
        assert told["ranks"]
        assert told["seconds"] < SOON


def interrupted(me: Me, backend: str | None, how: str) -> None:
    import cupy

    me.init(timeout=5, backend=backend)
    array = cupy.ones(100)
    if how != "first":
        dist.all_reduce(array)
        array.get()
    if me.rank == 0:
        me.interrupt_when_waiting()

        def call() -> None:
            if how == "work":
                dist.all_reduce(array, async_op=True).wait(60)
            else:
                dist.all_reduce(array)
                dist.barrier()

        me.say(told=me.attempt(call))
    else:
        me.wait_for("interrupted")
    me.mark("interrupted")
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["first", "work", "barrier"])
@each_engine
def test_ctrl_c_ends_a_wait(ranks: Ranks, machine: Any, engine: str, how: str) -> None:
    environment, backend = machine.engine(engine, 2)
    first, _ = ranks.run(interrupted, 2, env=environment, backend=backend, how=how)
    assert first.said["told"]["error"] == "KeyboardInterrupt", first.said
    assert first.said["told"]["at"] - first.said["interrupted_at"] < SOON


def leaving(me: Me, backend: str | None, how: str) -> None:
    """End with calls on the GPU under way."""
    import cupy

    me.init(timeout=60, backend=backend)
    group = dist.new_group()
    arrays = [cupy.full(2000, float(me.rank + number)) for number in range(10)]
    for array in arrays:
        dist.all_reduce(array, group=group, async_op=True)
    if how == "without":
        dist.barrier(group)
        return
    dist.destroy_process_group(group)
    me.say(sums=[float(array[-1].get()) for array in arrays], twice=me.attempt(dist.destroy_process_group, group))
    dist.destroy_process_group()


@each_engine
def test_a_group_ends_when_its_calls_have_been_carried_out(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    for rank in ranks.run(leaving, 2, env=environment, backend=backend, how="destroyed"):
        assert rank.said["sums"] == [1.0 + 2 * number for number in range(10)]
        assert rank.said["twice"]["error"] is None


@each_engine
def test_a_process_may_end_without_destroying_its_groups(ranks: Ranks, machine: Any, engine: str) -> None:
    environment, backend = machine.engine(engine, 2)
    started = ranks.start(leaving, 2, env=environment, backend=backend, how="without")
    ranks.wait(started)
    assert [rank.code for rank in started] == [0, 0], ranks.told()
    assert not any("Traceback" in rank.stderr for rank in started), ranks.told()
