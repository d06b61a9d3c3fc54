"""Groups that shrink: the others go on, under new numbers, also after a rank was killed."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from support import meetings
from support.hosting import embedded_only
from support.processes import Me, Ranks, on_ranks, wait_until

import rankmesh as dist
from rankmesh_agent.agent import Agent


def check_world(me: Me, ranks: list[int]) -> None:
    """The world has these of the first world's ranks, under new numbers: everything is reported and done in those."""
    size, rank = len(ranks), ranks.index(me.rank)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_process_group_ranks() == list(range(size))
    assert [dist.get_global_rank(None, each) for each in range(size)] == list(range(size))
    meetings.check_world()
    for source in range(size):
        array = np.array([me.rank])
        dist.broadcast(array, src=source)
        assert array[0] == ranks[source]
    if rank == 0:
        works = [dist.irecv(np.zeros(1), tag=peer) for peer in range(1, size)]
        assert all(work.wait() for work in works)
        assert [work.source_rank() for work in works] == list(range(1, size))
    else:
        dist.send(np.ones(1), dst=0, tag=rank)
    objects = [None] * size
    dist.all_gather_object(objects, me.rank)
    assert objects == ranks
    # Errors name ranks by their new numbers, too.
    if size > 1:
        late = size - 1
        group = dist.new_group()
        if rank != late:
            # With a limit of 1 s, ranks ask each other at its end, and blame one that has no processor just then.
            reported = me.attempt(dist.barrier, group, timeout=0.9)
            assert late in reported["ranks"], reported
        dist.barrier()
        reported = me.attempt(dist.all_reduce, np.ones(1 + (rank == late)))
        assert reported["error"] == "CollectiveMismatchError", reported
        assert f"rank {late}: all_reduce(float64[2], SUM)" in reported["text"], reported
        if rank == 0:
            reported = me.attempt(dist.recv, np.ones(1), late, timeout=0.05)
            assert f"recv from rank {late} " in reported["text"], reported
            assert reported["ranks"] == [late], reported
    # Groups are made of the new numbers.
    group = dist.new_group(range(size - 1, -1, -1), sort_ranks=False)
    assert dist.get_process_group_ranks(group) == list(range(size))[::-1]
    assert dist.get_rank(group) == size - 1 - rank
    array = np.array([1.0 * me.rank])
    dist.broadcast(array, src=size - 1, group=group)
    assert array[0] == ranks[-1]
    dist.destroy_process_group(group)


@on_ranks(5, env={"RANKMESH_TRANSPORT": "shm"})
def test_groups_shrink_and_their_ranks_are_numbered_anew(me: Me) -> None:
    me.init()
    pair = dist.new_group([0, 3])
    trio = dist.new_group([4, 1, 3], sort_ranks=False, timeout=13, group_desc="trio")
    before = dist.get_pg_count()
    # A subgroup: its ranks are numbered anew, the world's stay.
    if me.rank in (1, 3, 4):
        if me.rank != 1:
            smaller = dist.shrink_group([1], trio)
            assert dist.get_process_group_ranks(smaller) == [4, 3]
            assert dist.get_rank(smaller) == (0 if me.rank == 4 else 1)
            assert (smaller._communicator.timeout, smaller.group_desc) == (13, "trio")
            array = np.array([me.rank])
            dist.broadcast(array, src=3, group=smaller)
            assert array[0] == 3
            assert me.attempt(dist.barrier, trio)["error"] == "GroupAbortedError"
            assert dist.get_pg_count() == before
            again = dist.shrink_group([1 - smaller.rank()], smaller, dist.SHRINK_ABORT)
            assert dist.get_process_group_ranks(again) == [me.rank]
        else:
            reported = me.attempt(dist.shrink_group, [1], trio)
            assert reported["error"] == "RuntimeError", reported
    assert dist.get_world_size() == 5
    dist.barrier()
    # The world, twice: ranks 2 and 0 leave.
    if me.rank == 2:
        dist.destroy_process_group()
        return
    assert dist.shrink_group([2]) is dist.group.WORLD
    assert dist.get_pg_count() == 1
    if me.rank in (0, 3):
        assert me.attempt(dist.barrier, pair)["error"] == "GroupAbortedError", "all other groups end"
    check_world(me, [0, 1, 3, 4])
    if me.rank == 0:
        dist.barrier()
        me.wait_for("shrunk")
        dist.destroy_process_group()
        return
    dist.barrier()
    dist.shrink_group((0,), shrink_flags=dist.SHRINK_ABORT)
    check_world(me, [1, 3, 4])
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    assert dist.get_process_group_ranks(mine) == ([1] if me.rank == 3 else [0, 2])
    made = dist.split_group(None, [[2, 1]])
    assert (made is None) == (me.rank == 1)
    dist.barrier()
    me.mark("shrunk")
    dist.destroy_process_group()


def reduce_until_a_rank_fails() -> None:
    while True:
        dist.all_reduce(np.ones(1000))


def shrink_after_a_death(me: Me) -> None:
    me.init()
    world = list(range(me.size))
    for _ in range(2):
        dist.barrier()
        me.mark(f"going-{len(world)}-{me.rank}")
        reported = me.attempt(reduce_until_a_rank_fails)
        assert reported["error"] == "RankFailedError", reported
        (failed,) = reported["ranks"]
        before = dist.group.WORLD
        dist.shrink_group([failed])
        assert me.attempt(dist.barrier, before)["error"] in ("RankFailedError", "GroupAbortedError")
        del world[failed]
        check_world(me, world)
    me.report(world=world)
    dist.destroy_process_group()


@pytest.mark.processes
def test_survivors_shrink_the_world_by_what_the_error_names_and_go_on(ranks: Ranks) -> None:
    started = ranks.start(shrink_after_a_death, 4, env={"RANKMESH_TRANSPORT": "tcp"})
    alive = [0, 1, 2, 3]
    for dying in (1, 2):
        ranks.wait_for(*(f"going-{len(alive)}-{rank}" for rank in alive))
        started[dying].kill()
        alive.remove(dying)
    ranks.succeed([started[rank] for rank in alive])
    assert [started[rank].reported["world"] for rank in alive] == [[0, 3], [0, 3]]
    ranks.wait(started)
    assert started[1].code == started[2].code == -signal.SIGKILL


def shrink_by_the_first(me: Me) -> None:
    me.init()
    dist.get_default_store().add("sum", 1)
    dist.barrier()
    me.mark(f"going-{me.rank}")
    reported = me.attempt(reduce_until_a_rank_fails)
    assert (reported["error"], reported["ranks"]) == ("RankFailedError", [0]), reported
    agent = dist._session.session.current().agent
    embedded = isinstance(agent, Agent)
    if embedded:
        wait_until(lambda: agent.store.failure, "the failure, which the store's errors mention")
    dist.shrink_group([0])
    assert not embedded or agent.store.failure is None, "it names ranks by their old numbers"
    check_world(me, [1, 2])
    dist.get_default_store().add("sum", 10)
    dist.barrier()
    assert dist.get_default_store().get("sum") == b"23"
    dist.destroy_process_group()


@pytest.mark.processes
def test_survivors_go_on_without_rank_0_who_had_started_the_gateway(ranks: Ranks) -> None:
    started = ranks.start(shrink_by_the_first, 3)
    ranks.wait_for(*(f"going-{rank}" for rank in range(3)))
    started[0].kill()
    ranks.succeed(started[1:])


LONG = 150.0
"""Seconds after which a wait that nobody ends would pass its deadline."""


@on_ranks(4, env={"RANKMESH_TRANSPORT": "tcp"})
def test_who_waits_for_a_rank_that_shrinks_a_healthy_world_is_informed(me: Me) -> None:
    me.init(timeout=LONG)
    pair = dist.new_group([0, 1])
    dist.barrier()
    if me.rank == 3:
        me.wait_for("shrunk")
        dist.destroy_process_group()
        return
    if me.rank == 1:
        reported = me.attempt(dist.all_reduce, np.ones(1), group=pair)
        assert (reported["error"], reported["ranks"]) == ("GroupAbortedError", [3]), reported
        assert "left the group (it called shrink_group([3]) on group 'world') during all_reduce #" in reported["text"]
    dist.shrink_group([3])
    check_world(me, [0, 1, 2])
    if me.rank == 0:
        me.mark("shrunk")
    dist.destroy_process_group()


@on_ranks(3, env={"RANKMESH_TRANSPORT": "shm"})
def test_who_waits_for_a_rank_that_has_destroyed_the_group_is_informed(me: Me) -> None:
    me.init(timeout=LONG)
    trio = dist.new_group([0, 1, 2])
    for count in (3, 300_000):
        dist.all_reduce(np.ones(count), group=trio)
    if me.rank == 0:
        dist.send(np.ones(3), 1, group=trio)
        dist.destroy_process_group(trio)
    elif me.rank == 1:
        me.wait_for("told")
        dist.recv(np.ones(3), 0, group=trio)  # sent before
    else:
        reported = me.attempt(dist.recv, np.ones(1), 0, group=trio)
        assert (reported["error"], reported["ranks"]) == ("GroupAbortedError", [0]), reported
        assert "left the group (it called destroy_process_group) during recv" in reported["text"], reported
        me.mark("told")
    dist.barrier()
    dist.destroy_process_group()


@embedded_only("an agent does not change the time limit of a group that has ended")
@on_ranks(3)
def test_a_shrink_that_fails_can_be_repeated(me: Me) -> None:
    me.init(timeout=LONG)
    pair = dist.new_group([0, 1])
    dist.barrier()
    if me.rank == 2:
        me.wait_for("shrunk")
        dist.destroy_process_group()
        return
    dist.group.WORLD._communicator.set_timeout(1)
    if me.rank:
        me.wait_for("failed")
    reported = me.attempt(dist.shrink_group, [2])
    assert reported["error"] == ("GroupAbortedError" if me.rank else "CollectiveTimeoutError"), reported
    assert reported["ranks"] == [1], reported
    for group in (pair, None):
        assert me.attempt(dist.barrier, group)["error"] == "GroupAbortedError", "the old groups have ended"
    if not me.rank:
        me.mark("failed")
        me.wait_for("failed too")
    me.mark("failed too")
    dist.group.WORLD._communicator.set_timeout(LONG)
    dist.shrink_group([2])
    check_world(me, [0, 1])
    me.mark("shrunk")
    dist.destroy_process_group()
