"""What becomes of ranks of backend "mpi" whose calls cannot end: someone is named, and the job ends."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from support.failures import EVENTS
from support.mpi import MpiRun, on_mpi
from support.processes import Me, Ranks, wait_until

import rankmesh as dist

LEAVES = ("raises", "destroys")
"""What does not end the job at once."""
SOON = 120.0
"""Seconds, from the start of mpirun on a slow machine: what is not to hang would do so for far longer."""


def meet_without(me: Me, event: str, timeout: float = 300) -> None:
    dist.init_process_group("mpi", timeout=300)
    array = np.ones(3)
    dist.all_reduce(array)
    me.meet("there")
    if me.rank == 1:
        if event in LEAVES:
            me.wait_for("in the call")
        EVENTS[event].happen(me, None)
        time.sleep(300)
    threading.Timer(0.3, me.mark, ["in the call"]).start()
    began = time.monotonic()
    try:
        dist.all_reduce(array, timeout=timeout)
    except dist.DistBackendError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        me.report(seconds=time.monotonic() - began)


@pytest.mark.parametrize("event", ["killed", "exits at once", *LEAVES])
def test_a_rank_that_is_gone_is_named(ranks: Ranks, event: str) -> None:
    run = MpiRun(ranks, meet_without, 2, event=event)
    run.end(SOON)
    assert run.mpirun.code != 0
    reported = run.errors(0)
    # mpirun ends all when a process dies: it may be faster than the guard. A rank that raised does not die before the
    # others: MPI's own end waits for them.
    if reported or event in LEAVES:
        named = rf"RankFailedError: rank 1 \(\S+, pid \d+\) {EVENTS[event].says}"
        assert re.search(named, reported), run.transcript()
        assert re.search("(during|after) all_reduce #", reported), run.transcript()


def test_a_rank_that_is_late_is_named(ranks: Ranks) -> None:
    run = MpiRun(ranks, meet_without, 3, event="late", timeout=2)
    run.end(SOON)
    assert run.mpirun.code != 0
    reported = run.errors(0) + run.errors(2)
    assert "waited 2.0 s for rank 1 (" in reported, run.transcript()
    assert "arrived: 0, 2. MPI lets nothing end this call but the end of the job" in reported, run.transcript()


def test_calls_that_differ_are_named(ranks: Ranks) -> None:
    run = MpiRun(ranks, differ, 2)
    run.end(SOON)
    assert run.mpirun.code != 0
    reported = run.errors(0) + run.errors(1)
    assert "CollectiveMismatchError" in reported
    assert "rank 0: barrier(); rank 1: all_reduce(float64[3], SUM)" in reported


def differ(me: Me) -> None:
    dist.init_process_group("mpi", timeout=300)
    dist.all_reduce(np.ones(3)) if me.rank else dist.barrier()
    dist.barrier()


def test_of_calls_with_other_numbers_all_are_named(ranks: Ranks) -> None:
    """MPI need not meet in a call without elements: rank 0 is further then."""
    run = MpiRun(ranks, differ_in_number, 2)
    run.end(SOON)
    assert run.mpirun.code != 0
    reported = run.errors(0) + run.errors(1)
    first = re.search(
        r"This is all_reduce\(float64\[5\], SUM\) #(\d+); rank 0 has come to barrier\(\) #(\d+)", reported
    )
    other = re.search(
        r"This is barrier\(\) #(\d+); rank 1 has come to all_reduce\(float64\[5\], SUM\) #(\d+)", reported
    )
    assert first or other, run.transcript()


def differ_in_number(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    dist.all_reduce(np.ones(5 if me.rank else 0), timeout=2)
    dist.barrier(timeout=2)
    time.sleep(300)


@on_mpi(3, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_in_detail_calls_are_compared_before(me: Me) -> None:
    from support.wrong import MISMATCHED
    from support.wrong_attempts import try_mismatched

    dist.init_process_group("mpi", timeout=60)
    for name, (told,) in try_mismatched(dist, me.rank, [*MISMATCHED][::4], queued=False).items():
        assert told["error"] == "CollectiveMismatchError", (name, told)
        assert f"rank {me.rank}: {told['op']}(" in told["text"], (name, told)
        assert "called at" in told["text"], (name, told)
        assert all((told["unchanged"], told["usable"])), (name, told)


@on_mpi(3)
def test_splits_that_do_not_fit_are_named(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    sizes = [1, 2, 0] if me.rank == 2 else [1, 1, 1]
    output = np.full(3, -1)
    told = me.attempt(dist.all_to_all_single, output, np.arange(3), None, sizes)
    assert told["error"] == "CollectiveMismatchError", told
    assert "rank 0: all_to_all(int64) (sends [1, 1, 1] elements to the ranks" in told["text"]
    assert output.tolist() == [-1, -1, -1]
    array = np.ones(1)
    dist.all_reduce(array)
    assert array[0] == 3


@on_mpi(3)
def test_a_monitored_barrier_names_who_is_missing_and_nobody_dies(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    if me.rank == 1:
        me.wait_for("over")
        return
    told = me.attempt(dist.monitored_barrier, timeout=1)
    if me.rank == 0:
        assert (told["error"], told["ranks"]) == ("CollectiveTimeoutError", [1]), told
        assert "rank 1 failed to pass monitored_barrier in 1000 ms" in told["text"]
    me.mark(f"over-{me.rank}")
    me.wait_for("over-0", "over-2")
    me.mark("over")


@on_mpi(2)
def test_a_call_after_a_loss_raises(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    dist.barrier()
    if me.rank == 1:
        dist.destroy_process_group()
        me.mark("left")
        me.wait_for("told")
        return
    me.wait_for("left")
    lost = dist.group.WORLD._communicator.engine.lost_peers
    wait_until(lambda: 1 in lost, "the goodbye")
    told = me.attempt(dist.all_reduce, np.ones(1))
    me.mark("told")
    assert (told["error"], told["ranks"]) == ("RankFailedError", [1]), told


@on_mpi(3)
def test_a_group_without_the_lost_rank_ends_as_ever(me: Me) -> None:
    """Rank 2 has left when the group of the others ends."""
    from mpi4py import MPI

    dist.init_process_group("mpi", timeout=60)
    pair = dist.new_group([0, 1])
    if me.rank == 2:
        dist.destroy_process_group()
    else:
        lost = dist.group.WORLD._communicator.engine.lost_peers
        wait_until(lambda: 2 in lost, "the goodbye")
        comm = pair._communicator.queue.backend.comm
        dist.destroy_process_group(pair)
        assert comm == MPI.COMM_NULL
        me.mark(f"done-{me.rank}")
    me.wait_for("done-0", "done-1")  # a rank that ends earlier is lost to the other one


@on_mpi(3)
def test_an_early_leaver_does_not_end_a_call_it_has_done_its_part_of(me: Me) -> None:
    """Rank 0 of a broadcast has left when rank 2 comes."""
    dist.init_process_group("mpi", timeout=60)
    pair = dist.new_group([1, 2])
    array = np.full(1, 7 if me.rank == 0 else 0)
    if me.rank == 2:
        me.wait_for("left")
        time.sleep(1)
    dist.broadcast(array, 0)
    if me.rank == 0:
        dist.destroy_process_group()
        me.mark("left")
        me.wait_for("done")
        return
    dist.barrier(pair)
    assert array[0] == 7
    me.mark("done")


@on_mpi(2)
def test_ctrl_c_ends_a_receive(me: Me) -> None:
    dist.init_process_group("mpi", timeout=120)
    if me.rank == 0:
        me.interrupt_when_waiting()
        told = me.attempt(dist.recv, np.zeros(3), 1)
        me.mark("over")
        assert told["error"] == "KeyboardInterrupt", told
    else:
        me.wait_for("over")


def test_ctrl_c_ends_mpirun(ranks: Ranks) -> None:
    run = MpiRun(ranks, wait_for_ever, 2)
    ranks.wait_for("waits")
    time.sleep(0.5)
    run.mpirun.kill(signal.SIGINT)
    run.end(SOON)
    assert run.mpirun.code != 0


def wait_for_ever(me: Me) -> None:
    dist.init_process_group("mpi", timeout=300)
    if me.rank:
        time.sleep(300)
    me.mark("waits")
    dist.barrier()
