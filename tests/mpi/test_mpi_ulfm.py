"""Backend "mpi" under an MPI that goes on after the death of a rank (ULFM): the group ends, and the job goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from support.mpi import ULFM, MpiRun
from support.processes import Me, Ranks

import rankmesh as dist

SIZE = 4


def run(ranks: Ranks, body: object, victims: list[int], **arguments: object) -> list[dict]:
    """Run a body in SIZE ranks; return what the survivors reported, once they have ended well."""
    started = MpiRun(ranks, body, SIZE, options=ULFM, victims=victims, **arguments)
    started.end()
    survivors = [rank for rank in range(SIZE) if rank not in victims]
    errors = [started.errors(rank) for rank in survivors]
    assert errors == [""] * len(survivors), started.transcript()
    reported = [started.reported(rank) for rank in survivors]
    assert all(each.get("ended") for each in reported), started.transcript()
    return reported


def kill_and_shrink(me: Me, victims: list[int], count: int) -> None:
    """Sum without end; each victim dies in a sum, and the others shrink the world and go on."""
    dist.init_process_group("mpi", timeout=60)
    array = np.ones(count)
    for number, victim in enumerate(victims):
        dist.all_reduce(array)
        if me.rank == victim:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        told = me.attempt(lambda: [dist.all_reduce(array, dist.ReduceOp.AVG) for _ in iter(int, 1)])
        noticed = time.monotonic()
        gone = victim - sum(earlier < victim for earlier in victims[:number])
        assert (told["error"], told["ranks"]) == ("RankFailedError", [gone]), told
        assert re.search(rf"rank {gone} \(.*pid \d+\) failed \(.*\) (during|after) all_reduce #", told["text"]), told
        dist.shrink_group([gone])
        array[:] = dist.get_rank() + 1
        dist.all_reduce(array)
        size = SIZE - number - 1
        assert (dist.get_world_size(), array[0], array[-1]) == (size, *[size * (size + 1) / 2] * 2)
        me.report(**{f"seconds {number}": time.monotonic() - noticed})
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(np.full(3, 7.0), 1, group=pair)
    elif dist.get_rank() == 1:
        array = np.zeros(3)
        dist.recv(array, 0, group=pair)
        assert array.tolist() == [7.0] * 3
    dist.barrier()
    dist.destroy_process_group()
    me.report(ended=True)


@pytest.mark.parametrize("count", [5, 1 << 20])
@pytest.mark.parametrize("victims", [[2], [0, 3]])
def test_a_dead_rank_is_named_and_the_world_shrinks(ranks: Ranks, victims: list[int], count: int) -> None:
    run(ranks, kill_and_shrink, victims, count=count)


def lose_partner(me: Me, victims: list[int]) -> None:
    dist.init_process_group("mpi", timeout=60)
    dist.barrier()
    if me.rank in victims:
        me.wait_for("waits-0", "waits-1", "waits-2")
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.3, me.mark, [f"waits-{me.rank}"]).start()
    told = me.attempt(dist.recv, np.zeros(3), None if me.rank == 2 else victims[0])
    assert (told["error"], told["ranks"]) == ("RankFailedError", victims), told
    told = me.attempt(dist.new_group, [0, 1]) if me.rank < 2 else {}
    assert me.rank == 2 or "ranks [2] of MPI's world are not in this one" in told["text"], told
    dist.shrink_group(victims)
    dist.barrier()
    dist.destroy_process_group()
    me.report(ended=True)


def test_receives_from_a_dead_rank_name_it(ranks: Ranks) -> None:
    run(ranks, lose_partner, [3])


def come_late(me: Me, victims: list[int]) -> None:
    dist.init_process_group("mpi", timeout=60)
    group = dist.new_group(timeout=2)
    dist.barrier(group)
    if me.rank:
        told = me.attempt(dist.all_reduce, np.ones(3), group=group)
        assert (told["error"], told["ranks"]) in (("CollectiveTimeoutError", [0]), ("GroupAbortedError", [0])), told
        assert "waited 2.0 s for rank 0 (" in told["text"], told
        me.mark(f"told-{me.rank}")
    else:
        me.wait_for("told-1", "told-2", "told-3")
    array = np.ones(3)
    dist.all_reduce(array)
    assert array.tolist() == [4.0] * 3
    dist.destroy_process_group()
    me.report(ended=True)


def test_a_call_that_is_late_raises_and_other_groups_go_on(ranks: Ranks) -> None:
    run(ranks, come_late, [])


def leave(me: Me, victims: list[int], how: str) -> None:
    dist.init_process_group("mpi", timeout=60)
    dist.barrier()
    if me.rank in victims:
        me.wait_for("waits-0", "waits-1", "waits-2")
        if how == "raise":
            raise RuntimeError("a mistake")
        dist.destroy_process_group()
        return
    threading.Timer(0.3, me.mark, [f"waits-{me.rank}"]).start()
    told = me.attempt(dist.all_reduce, np.ones(3))
    assert (told["error"], told["ranks"]) == ("RankFailedError", victims), told
    assert ") left" in told["text"], told
    dist.shrink_group(victims)
    array = np.ones(3)
    dist.all_reduce(array)
    assert array.tolist() == [3.0] * 3
    dist.destroy_process_group()
    me.report(ended=True)


@pytest.mark.parametrize("how", ["raise", "leave"])
def test_the_world_shrinks_by_a_rank_that_left(ranks: Ranks, how: str) -> None:
    run(ranks, leave, [3], how=how)
