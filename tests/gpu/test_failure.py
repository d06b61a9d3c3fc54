"""Ranks that die, do not come or stray while arrays on GPUs are reduced: named, and the others' streams go on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.gpus import OfEngine, each_engine_once
from support.hosting import embedded_only
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

each_engine = pytest.mark.parametrize("engine", ["nccl", "staged"])
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
    me.report(told=told, after=int(after), again=me.attempt(dist.all_reduce, array))
    dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
    other = cupy.full(10, me.rank + 1.0)
    dist.all_reduce(other)
    me.report(size=dist.get_world_size(), sum=float(other[0].get()))
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
        told = rank.reported["told"]
        assert told["error"] == "RankFailedError", told
        assert told["ranks"] == [1]
        assert told["at"] - at < SOON
        assert rank.reported["after"] == 45
        assert rank.reported["again"]["ranks"] == [1]
        assert (rank.reported["size"], rank.reported["sum"]) == (2, 4.0)


def absent(me: Me) -> dict[str, Any]:
    """Rank 1 makes no call in time: of a group that has met before, and of one whose first call it is."""
    import cupy

    met, fresh, later = dist.new_group(), dist.new_group(), dist.new_group()
    fresh._communicator.set_timeout(2)  # not of making it: the other rank may be late
    array = cupy.ones(100)
    dist.all_reduce(array, group=met)
    told = {}
    if me.rank == 0:
        told["first"] = me.attempt(dist.all_reduce, array, group=fresh)

        def call() -> None:
            dist.all_reduce(array, group=met, timeout=1)
            array.get()  # of NCCL's, the call is on the stream by now
            dist.all_reduce(array, group=met)

        told["told"] = me.attempt(call)
    me.meet("over")
    return told | {"later": me.attempt(dist.all_reduce, cupy.ones(1), group=later)}


def astray(me: Me) -> dict[str, Any]:
    import cupy

    group, timeout = dist.new_group(), 10
    array = cupy.ones(100, np.float32)
    dist.all_reduce(array, group=group)

    def call() -> None:
        if me.rank:
            dist.all_reduce(array, dist.ReduceOp.MAX, group=group, timeout=timeout)
        else:
            dist.broadcast(array, 0, group=group, timeout=timeout)
        array.get()
        dist.barrier(group)

    return me.attempt(call)


def mixed(me: Me) -> dict[str, Any]:
    """One rank has its array on a GPU, the other one in host memory: in a group that has met before, and in another."""
    import cupy

    met, fresh = dist.new_group(), dist.new_group()
    dist.all_reduce(cupy.ones(1), group=met)
    array = cupy.ones(10) if me.rank == 0 else np.ones(10)
    told = me.attempt(dist.all_reduce, array, group=met, timeout=10)
    return {"told": told, "first": me.attempt(dist.all_reduce, array, group=fresh)}


def interrupted(me: Me) -> dict[str, Any]:
    """Ctrl-C while rank 1 does not come."""
    import cupy

    told = {}
    for how in ("first", "work", "barrier"):
        group = dist.new_group()
        array = cupy.ones(100)
        if how != "first":
            dist.all_reduce(array, group=group)
            array.get()
        if me.rank == 0:

            def call(group: Any = group, array: Any = array, how: str = how) -> None:
                if how == "work":
                    dist.all_reduce(array, group=group, async_op=True).wait(60)
                else:
                    dist.all_reduce(array, group=group)
                    dist.barrier(group)

            me.interrupt_when_waiting()
            told[how] = me.attempt(call)
        me.meet(f"interrupted-{how}")
        if me.rank == 1 and how != "first":
            me.attempt(dist.all_reduce, array, group=group, timeout=1)  # so that what is on the stream ends
    return told


def ending(me: Me) -> dict[str, Any]:
    """End a group with calls on the GPU under way."""
    import cupy

    group = dist.new_group()
    arrays = [cupy.full(2000, float(me.rank + number)) for number in range(10)]
    for array in arrays:
        dist.all_reduce(array, group=group, async_op=True)
    dist.destroy_process_group(group)
    sums = [float(array[-1].get()) for array in arrays]
    return {"sums": sums, "twice": me.attempt(dist.destroy_process_group, group)}


def everything(me: Me, backend: str | None) -> None:
    import cupy

    me.init(timeout=60, backend=backend)
    for part in (absent, astray, mixed, interrupted, *([ending] if backend == "nccl" else [])):
        me.report(**{part.__name__: part(me)})
        me.meet(part.__name__)
    # The process ends with calls on the GPU under way, of groups that it does not destroy.
    group = dist.new_group()
    for number in range(10):
        dist.all_reduce(cupy.full(2000, float(me.rank + number)), group=group, async_op=True)
    dist.barrier(group)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> OfEngine:
    """What the ranks of an engine reported; each part has groups of its own, which fail without the others."""
    return each_engine_once(tmp_path_factory, everything)


@each_engine
def test_a_rank_that_does_not_come_is_named(reported: OfEngine, machine: Any, engine: str) -> None:
    first, second = (of_rank["absent"] for of_rank in reported(machine, engine))
    for name in ("first", "told"):
        assert first[name]["error"] == "CollectiveTimeoutError", first[name]
        assert first[name]["ranks"] == [1]
        assert first[name]["seconds"] < SOON
    assert first["later"]["error"] is second["later"]["error"] is None


@embedded_only("attached processes do not report their calls over NCCL")
@each_engine
def test_ranks_that_make_different_calls_are_told_which(reported: OfEngine, machine: Any, engine: str) -> None:
    for of_rank in reported(machine, engine):
        told = of_rank["astray"]
        assert told["error"] == "CollectiveMismatchError", told
        assert "rank 0: broadcast" in told["text"]
        assert "rank 1: all_reduce" in told["text"]
        assert "missing" not in told["text"]


@embedded_only("attached processes do not report their calls over NCCL")
def test_a_rank_with_its_array_in_host_memory_is_named(reported: OfEngine, machine: Any) -> None:
    _, on_host = (of_rank["mixed"]["told"] for of_rank in reported(machine, "nccl"))
    # The call is on the stream of rank 0; what waits for it is that of the others.
    assert on_host["error"] == "CollectiveMismatchError", on_host
    assert "rank 0: all_reduce(float64[10], SUM, on cuda); rank 1: all_reduce(float64[10], SUM)" in on_host["text"]
    assert on_host["seconds"] < SOON


def test_a_rank_with_its_first_array_in_host_memory_is_named(reported: OfEngine, machine: Any) -> None:
    for of_rank in reported(machine, "nccl"):
        told = of_rank["mixed"]["first"]
        assert told["error"] == "CollectiveMismatchError", told
        assert "rank 0: all_gather(uint8[1024], the GPUs of the ranks); rank 1: all_reduce(float64[10]" in told["text"]
        assert told["seconds"] < SOON


@pytest.mark.parametrize("how", ["first", "work", "barrier"])
@each_engine
def test_ctrl_c_ends_a_wait(reported: OfEngine, machine: Any, engine: str, how: str) -> None:
    told = reported(machine, engine)[0]["interrupted"][how]
    assert told["error"] == "KeyboardInterrupt", told
    assert told["seconds"] < SOON


def test_a_group_ends_when_its_calls_have_been_carried_out(reported: OfEngine, machine: Any) -> None:
    for of_rank in reported(machine, "nccl"):
        assert of_rank["ending"]["sums"] == [1.0 + 2 * number for number in range(10)]
        assert of_rank["ending"]["twice"]["error"] is None


@each_engine
def test_a_process_may_end_without_destroying_its_groups(reported: OfEngine, machine: Any, engine: str) -> None:
    assert len(reported(machine, engine)) == 2  # both exited with code 0, and wrote nothing to standard error
