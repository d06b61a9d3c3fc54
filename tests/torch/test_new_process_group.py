"""Groups that a library constructs itself, as torchft does: each a job of its own, without a default group."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
from support.processes import Me, Ranks, on_ranks, wait_until
from support.to_itself import exchange_with_itself

import rankmesh
import rankmesh.torch


def summed(group: c10d.ProcessGroup) -> float:
    """Return the sum over the group's ranks of their ranks plus one."""
    tensor = torch.full((3,), group.rank() + 1.0)
    group.allreduce([tensor]).wait()
    return float(tensor[0])


@on_ranks(2)
def test_groups_come_and_go_and_the_world_stays(me: Me) -> None:
    store = c10d.FileStore(f"{me.folder}/store", me.size)
    me.init()
    world = rankmesh.group.WORLD
    for number in range(3):
        prefixed = c10d.PrefixStore(f"quorum-{number}", store)
        group = rankmesh.torch.new_process_group(prefixed, me.rank, me.size, timedelta(seconds=60))
        assert (group.rank(), group.size(), group.name()) == (me.rank, 2, "rankmesh")
        assert summed(group) == 3
        group.abort()
        group.shutdown()
        assert rankmesh.group.WORLD is world
    total = torch.ones(1)
    rankmesh.all_reduce(total)
    assert total == 2
    assert not c10d.is_initialized()
    rankmesh.destroy_process_group()
    wait_until(lambda: not any(name.startswith("rankmesh") for name in me.resources()[0]), "threads to end", 30)


@on_ranks(2)
def test_ranks_of_torch_s_groups_send_to_themselves(me: Me) -> None:
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/store", rank=me.rank, world_size=me.size)
    for group in (None, c10d.new_subgroups(1)[0]):
        exchange_with_itself(c10d, lambda count, value: torch.full((count,), float(value)), group)
    c10d.destroy_process_group()


def goes_on_alone(me: Me) -> None:
    store = c10d.FileStore(f"{me.folder}/store", me.size)
    both = rankmesh.torch.new_process_group(c10d.PrefixStore("both", store), me.rank, me.size, 60)
    me.report(sum=summed(both))
    if me.rank == 1:
        signal.pause()
    me.report(failure=me.attempt(summed, both)["error"])
    both.abort()
    both.shutdown()
    alone = rankmesh.torch.new_process_group(c10d.PrefixStore("alone", store), 0, 1, 60)
    me.report(alone=summed(alone))
    alone.shutdown()


@pytest.mark.processes
def test_a_group_follows_one_whose_rank_died(ranks: Ranks) -> None:
    survivor, victim = started = ranks.start(goes_on_alone, 2)
    wait_until(lambda: all("sum" in rank.reported for rank in started), "a sum")
    victim.kill()
    ranks.wait(started)
    assert survivor.reported == {"sum": 3, "failure": "RankFailedError", "alone": 1}, ranks.transcript()


def test_wrong_arguments_are_refused() -> None:
    store = c10d.HashStore()
    with pytest.raises(ValueError, match="rank must be 0 to world_size - 1 = 1, got 2"):
        rankmesh.torch.new_process_group(store, 2, 2)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        rankmesh.torch.new_process_group(store, 0, 1, -1)
    with pytest.raises(c10d.DistNetworkError, match=r"rank 1 did not reach torch's store within 0\.1 s"):
        rankmesh.torch.new_process_group(store, 0, 2, 0.1)
