"""A world of backend "mpi": ranks of MPI's, the rest of RankMesh as in any other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest
from support.mpi import once
from support.once import Said
from support.processes import Me

import rankmesh as dist

SIZE = 4
World = Callable[[int], Said]


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
    return once(tmp_path_factory, whole_world)


def test_ranks_are_mpis(world: World) -> None:
    assert [(said["rank"], said["size"]) for said in world(SIZE)] == [(rank, SIZE) for rank in range(SIZE)]


def test_it_says_what_it_is(world: World) -> None:
    for said in world(SIZE):
        assert (said["backend"], said["name"]) == ("mpi", "mpi")
        assert said["config"].startswith("cpu:mpi")
        assert said["info"] == ["mpi", "world"]


def test_the_agents_are_there(world: World) -> None:
    assert {said["health"] for said in world(SIZE)} == {"ok"}


def test_the_store_is_there(world: World) -> None:
    assert all(said["store"] == [str(rank) for rank in range(SIZE)] for said in world(SIZE))


def test_objects_go_round(world: World) -> None:
    for said in world(SIZE):
        assert said["objects"] == [{"rank": rank} for rank in range(SIZE)]
        assert said["shared"] == [{"from": 1}]


def test_registered_arrays_are_arrays(world: World) -> None:
    assert all(said["registered"] == [6.0] * 8 for said in world(SIZE))


def test_batches_are_made(world: World) -> None:
    assert all(said["batch"] == [[6 + 4 * number] * 2 for number in range(3)] for said in world(SIZE))


def test_calls_are_recorded(world: World) -> None:
    for said in world(SIZE):
        assert {"all_reduce", "barrier"} <= set(said["recorded"])
        assert not said["failed"]


def test_groups_have_communicators_of_their_own(world: World) -> None:
    by_rank = world(SIZE)
    assert [said["pairs"] for said in by_rank] == [["mpi", [0, 1], 3]] * 2 + [["mpi", [2, 3], 7]] * 2
    assert [said["split"] for said in by_rank] == [["mpi", [0, 2], 4], ["mpi", [1, 3], 6]] * 2
    assert [said["backwards"] for said in by_rank] == [None, ["mpi", [3, 1], 6], None, ["mpi", [3, 1], 6]]


def test_a_group_may_run_on_the_mesh(world: World) -> None:
    assert all(said["mesh"] == ["mesh", [0, 1, 2, 3], 10] for said in world(SIZE))


def test_the_world_outlives_its_groups(world: World) -> None:
    assert all(said["world_still"] == ["mpi", [0, 1, 2, 3], 10] for said in world(SIZE))


def test_a_world_shrinks(world: World) -> None:
    shrunk = [said.get("shrunk") for said in world(SIZE)]
    assert shrunk == [["mpi", [0, 1, 2], 6], ["mpi", [0, 1, 2], 6], None, ["mpi", [0, 1, 2], 6]]


def test_threads_end_with_it(world: World) -> None:
    assert all(said["threads"] == ["MainThread"] for said in world(SIZE))


def test_it_can_be_made_again(world: World) -> None:
    assert all(said["again"] == ["mpi", [0, 1, 2, 3], 10] for said in world(SIZE))


def test_one_rank_is_a_world(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert once(tmp_path_factory, alone)(1) == [{"sum": [2.0, 2.0], "gathered": [[2.0, 2.0]], "mean": [7, -7]}]


def alone(me: Me) -> None:
    dist.init_process_group("mpi")
    array, gathered, mean = np.full(2, 2.0), [np.zeros(2)], np.array([7, -7], np.int8)
    dist.all_reduce(array)
    dist.all_gather(gathered, array)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.barrier()
    me.say(sum=array.tolist(), gathered=[each.tolist() for each in gathered], mean=mean.tolist())
