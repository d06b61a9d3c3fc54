"""Groups whose ranks change while they exist: ``init_process_group(enable_reconfigure=True)`` of torch 2.14."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, Ranks, on_ranks, wait_until

import rankmesh

pytestmark = pytest.mark.skipif(not hasattr(c10d, "_reconfigure"), reason="torch has reconfigure from 2.14 on")


class Member:
    """One process's side of a group."""

    def __init__(self, me: Me, backend: str = "rankmesh") -> None:
        self.me = me
        self.store = c10d.FileStore(f"{me.folder}/store", me.size)
        c10d.init_process_group(
            backend,
            store=self.store,
            rank=me.rank,
            world_size=me.size,
            timeout=timedelta(seconds=60),
            enable_reconfigure=True,
        )

    def handles(self, name: str) -> list[str]:
        """Return all processes' handles."""
        self.store.set(f"{name}/{self.me.rank}", c10d._get_reconfigure_handle())
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.me.size)]

    def follows(self, uuid: int, handles: Any) -> tuple[int, int, float]:
        """Return rank, size and the sum of the ranks plus one after a reconfiguration."""
        assert c10d._reconfigure(uuid, handles, timeout=timedelta(seconds=60)).wait()
        total = torch.tensor([c10d.get_rank() + 1.0])
        c10d.all_reduce(total)
        return c10d.get_rank(), c10d.get_world_size(), total.item()


@on_ranks(3)
def test_ranks_part_and_meet_again(me: Me) -> None:
    member = Member(me)
    assert c10d._supports_reconfigure()
    with pytest.raises(RuntimeError, match=r"no calls before reconfigure\(\)"):
        c10d.all_reduce(torch.ones(1))
    assert member.follows(me.rank, [c10d._get_reconfigure_handle()]) == (0, 1, 1)  # three groups of one
    assert member.follows(10, member.handles("all")) == (me.rank, 3, 6)
    assert rankmesh.get_rank() == me.rank
    pair = c10d.new_group([0, 2])
    backwards = member.handles("all")[:0:-1]
    if me.rank == 0:
        assert member.follows(11, [c10d._get_reconfigure_handle()]) == (0, 1, 1)
    else:
        assert member.follows(12, backwards) == (2 - me.rank, 2, 3)
    if me.rank != 1:
        with pytest.raises(c10d.DistBackendError):
            c10d.all_reduce(torch.ones(1), group=pair)  # its ranks have gone
    assert member.follows(13, {*member.handles("any order")})[1:] == (3, 6)
    c10d.destroy_process_group()


@on_ranks(2)
def test_a_group_goes_on_after_abort_and_timeout_and_keeps_its_hooks_and_timeout(me: Me) -> None:
    member = Member(me)
    group = c10d.group.WORLD
    calls: list[Any] = []
    group.register_pre_hook(1, calls.append)
    handles = member.handles("all")
    assert member.follows(1, handles) == (me.rank, 2, 3)
    group.abort()
    assert member.follows(2, handles) == (me.rank, 2, 3)
    with pytest.raises(RuntimeError, match="uuid 2 was already used"):
        c10d._reconfigure(2, handles)
    with pytest.raises(RuntimeError, match=r"the handles \['x'\] lack that of this process"):
        c10d._reconfigure(3, ["x"])
    with pytest.raises(c10d.DistNetworkError, match=r"within 0\.2 s"):
        c10d._reconfigure(4 + me.rank, handles if me.rank else handles[::-1], timeout=timedelta(seconds=0.2))
    c10d.all_reduce(torch.ones(1))  # as before
    assert member.follows(6, handles) == (me.rank, 2, 3)
    assert group.options._timeout == timedelta(seconds=60)
    assert len(calls) == 4
    c10d.destroy_process_group()


def survives(me: Me) -> None:
    member = Member(me)
    me.report(first=member.follows(1, member.handles("first")))
    if me.rank == 1:
        signal.pause()
    me.report(failure=me.attempt(c10d.all_reduce, torch.ones(1))["error"])
    me.report(alone=member.follows(2, [c10d._get_reconfigure_handle()]))
    me.report(both=member.follows(3, member.handles("second")))
    c10d.destroy_process_group()


def comes_in_its_place(me: Me) -> None:
    member = Member(Me(1, 2, me.folder))
    me.report(both=member.follows(3, member.handles("second")))
    c10d.destroy_process_group()


@pytest.mark.processes
def test_a_process_comes_in_place_of_one_that_died(ranks: Ranks) -> None:
    survivor, victim = started = ranks.start(survives, 2)
    wait_until(lambda: all("first" in rank.reported for rank in started), "the first group")
    victim.kill()
    wait_until(lambda: "alone" in survivor.reported, "the survivor alone")
    other = ranks.start(comes_in_its_place, 1)
    ranks.wait([survivor, *other])
    expected = {"first": [0, 2, 3], "failure": "RankFailedError", "alone": [0, 1, 1], "both": [0, 2, 3]}
    assert survivor.reported == expected, ranks.transcript()
    assert other[0].reported == {"both": [1, 2, 3]}, ranks.transcript()
