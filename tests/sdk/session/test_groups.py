"""Groups: making, splitting and shrinking them, and the questions about them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist
import rankmesh_agent.progress.sinks

NOBODY = dist.GroupMember.NON_GROUP_MEMBER
QUESTIONS = [
    dist.get_rank,
    dist.get_world_size,
    dist.get_backend,
    dist.get_backend_config,
    dist.get_process_group_ranks,
]


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    # Questions

    def test_who_and_how_many(self) -> None:
        assert dist.is_initialized()
        assert dist.get_rank() == 0
        assert dist.get_world_size() == 1
        assert dist.get_backend() == "mesh"
        assert dist.get_backend_config() == "cpu:mesh,cuda:mesh"
        assert dist.get_process_group_ranks() == [0]
        assert dist.get_group_rank(None, 0) == dist.get_global_rank(None, 0) == 0
        assert dist.get_pg_count() == 1

    def test_the_world_has_a_name_of_its_own(self) -> None:
        world = dist.group.WORLD
        assert world is dist.GroupMember.WORLD
        assert isinstance(world, dist.ProcessGroup)
        assert world.group_name == "world"
        for ask in QUESTIONS:
            assert ask(world) == ask()

    def test_the_list_of_ranks_is_the_callers_own(self) -> None:
        dist.get_process_group_ranks().append(7)
        assert dist.get_process_group_ranks() == [0]

    def test_outside_a_group_there_is_no_rank(self) -> None:
        assert dist.get_rank(NOBODY) == -1
        assert dist.get_world_size(NOBODY) == -1
        assert dist.destroy_process_group(NOBODY) is None
        assert "NON_GROUP_MEMBER" in repr(NOBODY)
        for ask in (
            *(lambda ask=ask: ask(NOBODY) for ask in QUESTIONS[2:]),
            lambda: dist.get_group_rank(NOBODY, 0),
            lambda: dist.get_global_rank(NOBODY, 0),
            lambda: dist.new_subgroups(1, NOBODY),
            lambda: dist.split_group(NOBODY, [[0]]),
        ):
            with pytest.raises(ValueError, match="not a member"):
                ask()

    # new_group

    @pytest.mark.parametrize("ranks", [None, [0], (0,), range(1), np.arange(1), {0}], ids=repr)
    def test_a_group_of_all_ranks_and_of_some(self, ranks: Any) -> None:
        group = dist.new_group(ranks)
        assert isinstance(group, dist.ProcessGroup)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
        assert (group.rank(), group.size(), group.name()) == (0, 1, "mesh")
        assert dist.get_backend(group) == "mesh"
        assert dist.get_process_group_ranks(group) == [0]
        dist.destroy_process_group(group)

    def test_a_group_says_what_it_is(self) -> None:
        group = dist.new_group([0], group_desc="tensor parallel")
        dist.all_reduce(np.ones(1), group=group)
        assert repr(group) == f"<ProcessGroup {group.group_name!r}, rank 0 of 1, self, 1 calls>"
        assert group.group_desc == "tensor parallel"
        dist.destroy_process_group(group)
        group = dist.new_group([0])
        assert group.group_desc == "undefined"
        dist.destroy_process_group(group)

    def test_it_takes_all_of_torchs_arguments(self) -> None:
        group = dist.new_group([0], timedelta(minutes=1), "gloo", None, True, "desc", "cpu", False)
        dist.barrier(group)
        dist.destroy_process_group(group)

    @pytest.mark.parametrize("timeout", [timedelta(seconds=0.1), 0.1])
    def test_a_group_has_its_own_timeout(self, timeout: Any) -> None:
        group = dist.new_group([0], timeout=timeout)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"waited 0\.1 s"):
            dist.recv(np.ones(1), group=group)
        dist.destroy_process_group(group)

    def test_a_destroyed_group_says_so(self) -> None:
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        with pytest.raises(dist.GroupAbortedError, match="destroyed"):
            dist.barrier(group=group)
        with pytest.raises(dist.GroupAbortedError, match="destroyed"):
            dist.all_reduce(np.ones(1), group=group, async_op=True)
        assert dist.destroy_process_group(group) is None, "the second time it does nothing"
        dist.barrier()

    # Several groups at once

    # shrink_group

    def test_outside_a_group_nothing_is_excluded(self) -> None:
        with pytest.raises(ValueError, match="not a member"):
            dist.shrink_group([0], NOBODY)

    # get_node_local_rank

    def test_the_local_rank_is_the_environments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(RuntimeError, match="LOCAL_RANK is not set: start with 'rankmesh run', or pass fallback"):
            dist.get_node_local_rank()
        assert dist.get_node_local_rank(fallback_rank=3) == 3
        assert dist.get_node_local_rank(0) == 0
        monkeypatch.setenv("SLURM_LOCALID", "5")
        assert dist.get_node_local_rank() == 5
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert dist.get_node_local_rank(7) == 2


# Several ranks


@on_ranks(4)
def test_groups_of_four_ranks(me: Me) -> None:
    import warnings

    warnings.simplefilter("error")
    me.init()
    rank, nobody = me.rank, dist.GroupMember.NON_GROUP_MEMBER

    def total(group: Any) -> float:
        array = np.array([rank + 1.0])
        dist.all_reduce(array, group=group)
        return float(array[0])

    # new_group: who is in it, in which order; non-members get NON_GROUP_MEMBER, warnings, None and -1.
    for sort_ranks, order in ((True, [0, 1, 3]), (False, [3, 0, 1])):
        group = dist.new_group([3, 0, 1], sort_ranks=sort_ranks)
        if rank == 2:
            assert group is nobody
            assert dist.get_rank(group) == dist.get_world_size(group) == -1
            for ask in (dist.get_process_group_ranks, lambda group: dist.get_group_rank(group, 0)):
                assert "not a member of the group: make this call only at its members" in me.attempt(ask, group)["text"]
            for make in (lambda: dist.new_subgroups(1, nobody), lambda: dist.split_group(nobody, [[0]])):
                assert "not a member" in me.attempt(make)["text"]
            assert me.attempt(dist.send, np.ones(1), 0, group)["error"] == "ValueError"
            continue
        assert dist.get_process_group_ranks(group) == order
        assert dist.get_rank(group) == group.rank() == order.index(rank)
        assert [dist.get_global_rank(group, each) for each in range(3)] == order
        assert [dist.get_group_rank(group, each) for each in order] == [0, 1, 2]
        assert me.attempt(dist.get_group_rank, group, 2)["error"] == "ValueError"
        assert total(group) == 7
        array = np.full(2, rank)
        dist.broadcast(array, src=3, group=group)
        assert array[0] == 3
        gathered = np.zeros(3, int)
        dist.all_gather_single(gathered, np.array([rank]), group)
        assert gathered.tolist() == order
        assert me.attempt(dist.broadcast, array, src=2, group=group)["error"] == "ValueError"
    if rank == 2:
        for call in (
            lambda: dist.all_reduce(np.ones(1), group=group),
            lambda: dist.barrier(group, async_op=True),
            lambda: dist.isend(np.ones(1), 0, group),
            lambda: dist.monitored_barrier(group),
            lambda: dist.recv(np.ones(1), 0, group),
        ):
            warned = me.attempt(call)
            assert warned["error"] == "RuntimeWarning", warned
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert call() in (None, -1)
    dist.barrier()
    before = dist.get_pg_count()

    # Only the members call.
    if rank in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        assert total(group) == 5
        dist.destroy_process_group(group)

    # Subgroups: by size, of the host, by enumeration, of a group.
    mine, groups = dist.new_subgroups(2)
    assert [each is nobody for each in groups] == [rank >= 2, rank < 2]
    assert mine in groups
    assert dist.get_process_group_ranks(mine) == ([0, 1] if rank < 2 else [2, 3])
    assert total(mine) == (3 if rank < 2 else 7)
    host, groups = dist.new_subgroups()
    assert dist.get_process_group_ranks(host) == [0, 1, 2, 3], "all are on this host"
    assert groups == [host]
    nested, groups = dist.new_subgroups(1, group=mine)
    assert dist.get_process_group_ranks(nested) == [rank]
    assert len(groups) == 2
    odd, groups = dist.new_subgroups_by_enumeration([[3, 0], [1]])
    assert len(groups) == 2
    assert (odd is None) == (rank == 2)
    if odd is not None:
        assert dist.get_process_group_ranks(odd) == ([1] if rank == 1 else [0, 3])
    assert me.attempt(dist.new_subgroups_by_enumeration, [[0, 1], [1, 2]])["error"] == "ValueError"
    assert me.attempt(dist.new_subgroups_by_enumeration, [[0, 1], [2, 4]])["error"] == "ValueError"

    # split_group: ranks are those of the parent, and so is their order.
    parent = dist.new_group([2, 3, 0, 1], sort_ranks=False, group_desc="parent", timeout=11)
    made = dist.split_group(parent, [[1, 0], [3]], group_desc="child")
    expected = {2: [2, 3], 3: [2, 3], 1: [1]}.get(rank)
    assert (made is None) == (expected is None)
    if made is not None:
        assert dist.get_process_group_ranks(made) == expected
        assert made.group_desc == "child"
        assert made._communicator.timeout == 11, "the parent's"
        assert total(made) == {1: 2, 2: 7, 3: 7}[rank]
    everyone = dist.split_group(None, [range(4)], timeout=12)
    assert dist.get_process_group_ranks(everyone) == [0, 1, 2, 3]

    # A wrong call leaves nothing behind.
    for call in (
        lambda: dist.split_group(parent, [[0, 4]]),
        lambda: dist.split_group(parent, [[0], [0]]),
        lambda: dist.new_group([0, 4]),
        lambda: dist.new_group([0, 1, 2, 3], backend="nccl"),
    ):
        assert me.attempt(call)["error"] in ("ValueError", "DistBackendError")
    count = dist.get_pg_count()
    assert count == before + 5 + (odd is not None) + (made is not None), (before, count)

    # One group ends; then all do, with the world.
    dist.destroy_process_group(parent)
    assert dist.get_pg_count() == count - 1
    assert me.attempt(dist.barrier, parent)["error"] == "GroupAbortedError"
    assert total(everyone) == total(None) == 10
    dist.destroy_process_group(dist.group.WORLD)
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    for group in (everyone, host, mine):
        assert me.attempt(dist.barrier, group)["error"] == "GroupAbortedError"
    assert me.attempt(dist.get_rank)["error"] == "ValueError"


MAKERS: list[Callable[[float], Any]] = [
    lambda timeout: dist.new_group(timeout=timeout),
    lambda timeout: dist.new_group([2, 0, 1], timeout, sort_ranks=False),
    lambda timeout: dist.split_group(None, [[0, 1, 2]], timeout),
    lambda timeout: dist.new_subgroups(3, timeout=timeout)[0],
]


@on_ranks(3, env={"RANKMESH_TRANSPORT": "tcp"})
def test_an_attempt_to_make_a_group_fails_without_effect_on_the_next(me: Me) -> None:
    me.init(timeout=60)
    for number, make in enumerate(MAKERS):
        for late in (0, 2):
            # All the others give up, and are in their second attempt, as far as they come, while one begins its first.
            if me.rank == late:
                me.wait_for(*(f"gave up {number} {late} {rank}" for rank in range(3) if rank != late))
            failed = me.attempt(make, 60 if me.rank == late else 0.1)
            assert failed["error"] in ("CollectiveTimeoutError", "GroupAbortedError"), failed
            assert late in failed["ranks"], failed
            me.mark(f"gave up {number} {late} {me.rank}")
            group = make(60)
            array = np.array([1.0 + me.rank])
            dist.all_reduce(array, group=group)
            assert array[0] == 6
            dist.destroy_process_group(group)


@on_ranks(2)
def test_attempts_that_no_other_member_makes_end_no_connection(me: Me) -> None:
    me.init(timeout=60)
    sinks = rankmesh_agent.progress.sinks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks, "_MAX_UNEXPECTED_BYTES", 10 * sinks._MIN_COST)
        dist.barrier()
        if me.rank == 1:
            for _ in range(20):
                assert me.attempt(dist.new_group, [0, 1], 0.01)["error"] == "CollectiveTimeoutError"
        dist.barrier()


@on_ranks(3, env={"RANKMESH_TRANSPORT": "shm"})
def test_groups_that_overlap_work_at_once_in_several_threads(me: Me) -> None:
    me.init()
    rank = me.rank
    members = [[0, 1, 2], [0, 2], [1, 2], [2, 1, 0], [0, 1, 2], [0, 1]]
    groups = [(number, ranks, dist.new_group(ranks, sort_ranks=False)) for number, ranks in enumerate(members)]
    failures, finished = [], []

    def work(number: int, ranks: list[int], group: Any) -> None:
        try:
            random = np.random.default_rng(number)
            for step in range(60):
                count = int(random.choice([1, 100, 5_000, 60_000]))
                kind = int(random.integers(5))
                array = np.full(count, float(step + rank))
                expected = step * len(ranks) + sum(ranks)
                if kind == 0:
                    dist.all_reduce(array, group=group)
                    assert (array == expected).all()
                elif kind == 1:
                    works = [dist.all_reduce(array, group=group, async_op=True), dist.barrier(group, async_op=True)]
                    for each in works:
                        each.wait()
                    assert (array == expected).all()
                elif kind == 2:
                    outputs = [np.zeros(count) for _ in ranks]
                    dist.all_gather(outputs, array, group)
                    assert [output[-1] for output in outputs] == [step + each for each in ranks]
                elif kind == 3:
                    got, me_here = np.zeros(count), group.rank()
                    sending = dist.isend(array, group=group, group_dst=(me_here + 1) % len(ranks))
                    source = dist.recv(got, group=group, group_src=(me_here - 1) % len(ranks))
                    sending.wait()
                    assert source == ranks[me_here - 1]
                    assert (got == step + source).all()
                else:
                    dist.broadcast(array, src=ranks[step % len(ranks)], group=group)
                    assert (array == step + ranks[step % len(ranks)]).all()
            finished.append(number)
        except BaseException as error:
            failures.append(f"group {number}: {type(error).__name__}: {error}")

    mine = [each for each in groups if rank in each[1]]
    threads = [threading.Thread(target=work, args=each, daemon=True) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert len(finished) == len(mine), finished
    dist.barrier()
    dist.destroy_process_group()
