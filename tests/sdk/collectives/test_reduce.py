"""all_reduce, reduce, broadcast and the barriers: their arguments, and what they do."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.processes import Me, Ranks

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
