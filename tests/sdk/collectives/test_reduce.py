"""all_reduce, reduce, broadcast and the barriers: their arguments, and what they do."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.processes import Me, Ranks, on_ranks

import rankmesh as dist


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    def test_barriers_of_one_rank_return(self) -> None:
        assert dist.barrier() is None
        assert dist.barrier(device_ids=[0]) is None
        assert dist.barrier(None, False, None, 5) is None
        assert dist.monitored_barrier() is None
        assert dist.monitored_barrier(None, 5.0, True) is None

    def test_a_source_that_overlaps_itself_is_only_read(self) -> None:
        assert dist.broadcast(np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), 0) is None

    def test_a_monitored_barrier_outside_the_group_warns(self) -> None:
        with pytest.warns(RuntimeWarning, match=r"monitored_barrier\(\) does nothing"):
            assert dist.monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER) is None


# Several ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_collectives_of_three_ranks(me: Me) -> None:
    me.init()
    rank, op = me.rank, dist.ReduceOp
    mine = np.arange(6, dtype=np.float32) + rank
    total = np.arange(6) * 3 + 3.0

    # Only the destination's array is written, so the others' may be read-only; ranks are global or the group's.
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    for named, destination in (({"dst": 1}, 1), ({"dst": 2, "group": group}, 2), ({"group_dst": 1, "group": group}, 0)):
        array = mine.copy()
        array.flags.writeable = rank == destination
        dist.reduce(array, **named)
        assert array.tolist() == (total if rank == destination else mine).tolist()
        array = mine.copy()
        array.flags.writeable = rank == destination
        dist.reduce(array, op=op.PREMUL_SUM(2), **named)
        assert array.tolist() == (2 * total if rank == destination else mine).tolist()

    for named, source in (({"src": 1}, 1), ({"src": 2, "group": group}, 2), ({"group_src": 1, "group": group}, 0)):
        array = mine.copy()
        array.flags.writeable = rank != source
        dist.broadcast(array, **named)
        assert array.tolist() == (np.arange(6) + source).tolist()

    # Only the number and the order of elements must be the same, not their layout.
    laid_out = [np.full((4, 2), 1.0), np.full((2, 8), 2.0)[:, ::2], np.full((2, 2, 2), 4.0).T][rank]
    dist.all_reduce(laid_out)
    assert (laid_out == 7).all()
    big_endian = np.full(3, rank, ">i4")
    dist.all_reduce(big_endian)
    assert big_endian.tolist() == [3, 3, 3]
    assert big_endian.dtype == ">i4"
    single = np.array(rank + 1.0)
    dist.all_reduce(single)
    assert single == 6

    dist.barrier()
    dist.monitored_barrier()
    dist.destroy_process_group()


def monitor(me: Me) -> None:
    me.init()
    early = me.rank in (0, 3)
    for wait_all_ranks in (False, True):
        group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
        dist.barrier()  # nobody is late who is not meant to be
        if early:
            reported = me.attempt(dist.monitored_barrier, group, 0.5, wait_all_ranks)
            me.report(**{str(wait_all_ranks): reported})
        dist.barrier()
        dist.destroy_process_group(group)
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_monitored_barrier_names_the_first_or_all_that_do_not_come(ranks: Ranks) -> None:
    started = ranks.run(monitor, 4)
    for wait_all_ranks, words in (("False", "rank"), ("True", "ranks")):
        found = [started[rank].reported[wait_all_ranks] for rank in (0, 3)]
        for reported in found:
            assert reported["error"] == "CollectiveTimeoutError", reported
            arrived = re.search(r"; arrived: ([\d, ]+)\)$", reported["text"])
            assert arrived, reported
            missing = {0, 1, 2, 3} - set(map(int, arrived[1].split(", ")))
            assert missing >= {1, 2}, reported  # on a busy machine one of the others may be late, too
            assert missing >= set(reported["ranks"]), reported
            assert len(reported["ranks"]) == (len(missing) if wait_all_ranks == "True" else 1), reported
            named = ", ".join(map(str, reported["ranks"]))
            assert reported["text"].startswith(f"{words} {named} failed to pass monitored_barrier in 500 ms")
            assert "waited 0.5 s for rank" in reported["text"]
