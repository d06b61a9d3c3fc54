"""A world of backend "mpi": ranks of MPI's, the rest of RankMesh as in any other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.mpi import on_mpi, run
from support.once import Said, once
from support.processes import Me

import rankmesh as dist

SIZE = 4
World = Callable[[], Said]


def whole_world(me: Me) -> None:
    import urllib.request

    dist.init_process_group("mpi", timeout=60)
    members = dist.group.WORLD._communicator
    from rankmesh._session.session import current

    with urllib.request.urlopen(f"{current().agent.member.http}/health") as answer:
        health = json.load(answer)
    me.say(
        rank=dist.get_rank(), size=dist.get_world_size(), backend=dist.get_backend(), config=dist.get_backend_config(),
        info=[members.info().medium, members.info().name], health=health["status"], name=dist.group.WORLD.name(),
    )  # fmt: skip

    dist.get_default_store().set(f"of {me.rank}", str(me.rank))
    me.say(store=[dist.get_default_store().get(f"of {rank}").decode() for rank in range(me.size)])

    objects = [None] * me.size
    dist.all_gather_object(objects, {"rank": me.rank})
    shared = [{"from": me.rank}]
    dist.broadcast_object_list(shared, src=1)
    me.say(objects=objects, shared=shared)

    array = dist.empty(8, dtype=np.float32)
    array[:] = me.rank
    dist.all_reduce(array)
    me.say(registered=array.tolist())

    arrays = [np.full(2, me.rank + number) for number in range(3)]
    with dist.batch():
        for each in arrays:
            dist.all_reduce(each)
    me.say(batch=[each.tolist() for each in arrays])

    dist.barrier()
    dist.monitored_barrier(timeout=30)
    records = members.recorder.records()
    me.say(
        recorded=sorted({record.op for record in records}), failed=[record.error for record in records if record.error]
    )

    def of(group):
        array = np.full(3, dist.get_rank() + 1)
        dist.all_reduce(array, group=group)
        return [dist.get_backend(group), dist.get_process_group_ranks(group), int(array[0])]

    backwards = dist.new_group([3, 1], sort_ranks=False)
    pairs, _ = dist.new_subgroups(2)
    split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    mesh = dist.new_group(backend="gloo")
    me.say(pairs=of(pairs), split=of(split), mesh=of(mesh), backwards=of(backwards) if me.rank in (1, 3) else None)
    for group in (pairs, split, mesh):
        dist.destroy_process_group(group)
    me.say(world_still=of(None))
    if me.rank != 2:
        dist.shrink_group([2])
        me.say(shrunk=of(None))
        dist.barrier()
    dist.destroy_process_group()
    me.say(threads=sorted(thread.name for thread in threading.enumerate()))
    dist.init_process_group("cpu:mpi,cuda:nccl")
    me.say(again=of(None))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return once(tmp_path_factory, lambda ranks: run(ranks, whole_world, SIZE))


ALL = [0, 1, 2, 3]
SHRUNK = ["mpi", [0, 1, 2], 6]
SAID: dict[str, list[Any]] = {
    "rank": ALL,
    "size": [SIZE] * 4,
    "backend": ["mpi"] * 4,
    "name": ["mpi"] * 4,
    "info": [["mpi", "world"]] * 4,
    "health": ["ok"] * 4,
    "store": [[str(rank) for rank in ALL]] * 4,
    "objects": [[{"rank": rank} for rank in ALL]] * 4,
    "shared": [[{"from": 1}]] * 4,
    "registered": [[6.0] * 8] * 4,
    "batch": [[[6 + 4 * number] * 2 for number in range(3)]] * 4,
    "failed": [[]] * 4,
    "pairs": [["mpi", [0, 1], 3]] * 2 + [["mpi", [2, 3], 7]] * 2,
    "split": [["mpi", [0, 2], 4], ["mpi", [1, 3], 6]] * 2,
    "backwards": [None, ["mpi", [3, 1], 6]] * 2,
    "mesh": [["mesh", ALL, 10]] * 4,
    "world_still": [["mpi", ALL, 10]] * 4,
    "shrunk": [SHRUNK, SHRUNK, None, SHRUNK],
    "threads": [["MainThread"]] * 4,
    "again": [["mpi", ALL, 10]] * 4,
}
"""What each rank has to say: groups by their backend, ranks and a sum."""


@pytest.mark.parametrize("subject", SAID)
def test_it_is_a_world_as_any_other(world: World, subject: str) -> None:
    assert [said.get(subject) for said in world()] == SAID[subject]


def test_calls_are_recorded_and_backends_named(world: World) -> None:
    for said in world():
        assert {"all_reduce", "barrier"} <= set(said["recorded"])
        assert said["config"].startswith("cpu:mpi")


@on_mpi(1)
def test_one_rank_is_a_world(me: Me) -> None:
    dist.init_process_group("mpi")
    array, gathered, mean = np.full(2, 2.0), [np.zeros(2)], np.array([7, -7], np.int8)
    dist.all_reduce(array)
    dist.all_gather(gathered, array)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.barrier()
    assert [each.tolist() for each in (array, *gathered, mean)] == [[2.0, 2.0], [2.0, 2.0], [7, -7]]
