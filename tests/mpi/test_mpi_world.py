"""A world of backend "mpi": ranks of MPI's, the rest of RankMesh as in any other."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import numpy as np
from support.mpi import on_mpi
from support.processes import Me

import rankmesh as dist

ALL = [0, 1, 2, 3]


def assert_over(group: Any, backend: str, ranks: list[int]) -> None:
    """Fail unless a group has this backend and these ranks, and sums over them."""
    array = np.full(3, dist.get_rank() + 1)
    dist.all_reduce(array, group=group)
    found = dist.get_backend(group), dist.get_process_group_ranks(group), int(array[0])
    assert found == (backend, ranks, sum(ranks) + len(ranks))


@on_mpi(4)
def test_it_is_a_world_as_any_other(me: Me) -> None:
    from rankmesh._session.session import current

    dist.init_process_group("mpi", timeout=60)
    members = dist.group.WORLD._communicator
    with urllib.request.urlopen(f"{current().agent.member.http}/health") as answer:
        assert json.load(answer)["status"] == "ok"
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (me.rank, 4, "mpi")
    assert dist.get_backend_config().startswith("cpu:mpi")
    assert (members.info().medium, members.info().name, dist.group.WORLD.name()) == ("mpi", "world", "mpi")

    dist.get_default_store().set(f"of {me.rank}", str(me.rank))
    assert [dist.get_default_store().get(f"of {rank}").decode() for rank in ALL] == ["0", "1", "2", "3"]

    objects = [None] * me.size
    dist.all_gather_object(objects, {"rank": me.rank})
    assert objects == [{"rank": rank} for rank in ALL]
    shared = [{"from": me.rank}]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [{"from": 1}]

    array = dist.empty(8, dtype=np.float32)
    array[:] = me.rank
    dist.all_reduce(array)
    assert array.tolist() == [6.0] * 8

    arrays = [np.full(2, me.rank + number) for number in range(3)]
    with dist.batch():
        for each in arrays:
            dist.all_reduce(each)
    assert [each.tolist() for each in arrays] == [[6 + 4 * number] * 2 for number in range(3)]

    dist.barrier()
    dist.monitored_barrier(timeout=30)
    records = members.recorder.records()
    assert {record.op for record in records} >= {"all_reduce", "barrier"}
    assert not [record.error for record in records if record.error]


@on_mpi(4)
def test_groups_are_as_in_any_other_world(me: Me) -> None:
    dist.init_process_group("mpi", timeout=60)
    backwards = dist.new_group([3, 1], sort_ranks=False)
    pairs, _ = dist.new_subgroups(2)
    split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    mesh = dist.new_group(backend="gloo")
    assert_over(pairs, "mpi", [0, 1] if me.rank < 2 else [2, 3])
    assert_over(split, "mpi", [1, 3] if me.rank % 2 else [0, 2])
    assert_over(mesh, "mesh", ALL)
    if me.rank in (1, 3):
        assert_over(backwards, "mpi", [3, 1])
    for group in (pairs, split, mesh):
        dist.destroy_process_group(group)
    assert_over(None, "mpi", ALL)
    if me.rank != 2:
        dist.shrink_group([2])
        assert_over(None, "mpi", [0, 1, 2])
        dist.barrier()
    dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    dist.init_process_group("cpu:mpi,cuda:nccl")
    assert_over(None, "mpi", ALL)


@on_mpi(1)
def test_one_rank_is_a_world(me: Me) -> None:
    dist.init_process_group("mpi")
    array, gathered, mean = np.full(2, 2.0), [np.zeros(2)], np.array([7, -7], np.int8)
    dist.all_reduce(array)
    dist.all_gather(gathered, array)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.barrier()
    assert [each.tolist() for each in (array, *gathered, mean)] == [[2.0, 2.0], [2.0, 2.0], [7, -7]]
