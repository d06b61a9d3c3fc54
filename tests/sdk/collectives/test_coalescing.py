"""Batches of collectives: made together at the end of the block, as if they had been made one by one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def made() -> int:
    """Return how many operations the world has begun."""
    world = dist.group.WORLD
    assert world is not None
    return world._communicator.info().seq


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    def test_nothing_is_made_before_the_end_and_neighbouring_reductions_become_one(self) -> None:
        before = made()
        arrays = [np.full(count, 2.0) for count in (3, 0, 5)]
        output = np.zeros(3)
        with dist.batch() as batch:
            for array in arrays:
                assert dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(0.5)) is None
            dist.all_gather([output], np.ones(3))
            assert made() == before
            assert not output.any()
            assert arrays[0].tolist() == [2, 2, 2]
        assert made() == before + 2
        assert batch.works == []
        assert output.all()
        assert [array.tolist() for array in arrays] == [[1, 1, 1], [], [1, 1, 1, 1, 1]]

    def test_an_asynchronous_batch_has_a_work_for_each_operation(self) -> None:
        array, output = np.ones(3), np.zeros((2, 3)).T[:, :1]
        with dist.batch(async_ops=True) as batch:
            dist.all_reduce(array)
            dist.all_reduce(array[:1].copy())
            dist.all_gather([output], np.full(3, 4.0))
        assert len(batch.works) == 2
        assert batch.wait() is None
        assert all(work.is_success() for work in batch.works)
        assert output.tolist() == [[4], [4], [4]]
        batch.wait(timeout=1)

    def test_the_works_of_calls_inside_are_not_waited_for(self) -> None:
        with dist.batch():
            work = dist.all_reduce(np.ones(2), async_op=True)
            assert isinstance(work, dist.Work)
            for ask in (work.wait, work.result, work.is_completed, work.is_success, work.exception, work.get_future):
                with pytest.raises(RuntimeError, match="this call is part of a batch: wait for the batch"):
                    ask()

    @pytest.mark.parametrize("async_ops", [False, True])
    def test_an_error_in_the_block_forgets_its_calls(self, async_ops: bool) -> None:
        before, array = made(), np.ones(3)

        def fail_in_the_block() -> None:
            with dist.batch(async_ops=async_ops):
                dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(3))
                raise KeyError("no such layer")

        with pytest.raises(KeyError, match="no such layer"):
            fail_in_the_block()
        assert made() == before
        assert (array == 1).all()
        dist.barrier()
        assert made() == before + 1, "the group makes calls at once again"

    def test_batches_of_a_group_do_not_nest_those_of_others_do(self) -> None:
        group = dist.new_group([0])
        array = np.ones(1)
        before = made()
        with dist.batch():
            with pytest.raises(RuntimeError, match=r"a batch is already open for group 'world'"), dist.batch():
                pass
            with dist.batch(group):
                dist.all_reduce(array)
                dist.all_reduce(array, group=group)
            assert made() == before
        assert made() == before + 1
        dist.destroy_process_group(group)

    def test_calls_of_other_threads_and_groups_are_made_at_once(self) -> None:
        group = dist.new_group([0])
        before, output = made(), np.zeros(1)
        with dist.batch():
            dist.all_gather([output], np.ones(1), group=group)
            assert output.all()
            other = threading.Thread(target=dist.barrier)
            other.start()
            other.join(10)
            assert made() == before + 1
        assert made() == before + 1
        dist.destroy_process_group(group)

    def test_a_barrier_and_reductions_keep_their_order(self) -> None:
        before, array = made(), np.ones(1)
        with dist.batch():
            dist.barrier()
            dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(2))
            dist.barrier()
        assert made() == before + 3
        assert array[0] == 2

    def test_reductions_of_one_array_of_other_dtypes_and_operations_stay_apart(self) -> None:
        array = np.ones(4)
        for second in (array, array[2:], array[:1]):
            before = made()
            with dist.batch():
                dist.all_reduce(array)
                dist.all_reduce(np.ones(1))
                dist.all_reduce(second)
            assert made() > before + 1
        before = made()
        with dist.batch():
            for dtype, op in (("f8", "SUM"), ("f8", "SUM"), ("f4", "SUM"), ("f4", "MAX"), ("f8", "SUM")):
                dist.all_reduce(np.ones(2, dtype), dist.ReduceOp[op])
        assert made() == before + 4

    def test_objects_are_refused_in_a_batch(self) -> None:
        found: list[Any] = [None]
        with dist.batch(), pytest.raises(RuntimeError, match="objects cannot be sent in a batch"):
            dist.all_gather_object(found, {})
        dist.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}]

    def test_a_monitored_barrier_is_refused_in_a_batch(self) -> None:
        with dist.batch(), pytest.raises(RuntimeError, match=r"monitored_barrier\(\) cannot be part of a batch"):
            dist.monitored_barrier()
        dist.monitored_barrier()

    def test_an_empty_batch_makes_nothing(self) -> None:
        before = made()
        with dist.batch(async_ops=True) as batch:
            pass
        batch.wait()
        assert made() == before

    def test_a_group_destroyed_in_its_batch_says_so(self) -> None:
        group = dist.new_group([0])

        def destroy_in_the_block() -> None:
            with dist.batch(group):
                dist.barrier(group)
                dist.destroy_process_group(group)

        with pytest.raises(dist.GroupAbortedError, match="has been destroyed"):
            destroy_in_the_block()

    def test_torchs_name(self) -> None:
        array = np.ones(3)
        with dist._coalescing_manager(dist.group.WORLD, device="cpu", async_ops=True) as manager:
            dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(2))
        manager.wait()
        assert (array == 2).all()

    # Functions that are batches themselves

    def test_all_reduce_coalesced(self) -> None:
        before = made()
        arrays = [np.ones(3), np.ones((2, 2)).T, np.ones(4)[::2]]
        assert dist.all_reduce_coalesced(arrays, dist.ReduceOp.PREMUL_SUM(2)) is None
        assert all((array == 2).all() for array in arrays[:2])
        assert arrays[2].base is not None
        assert arrays[2].base.tolist() == [2, 1, 2, 1]
        assert made() == before + 1
        work = dist.all_reduce_coalesced(arrays, async_op=True)
        assert work is not None
        assert work.wait() is None
        assert dist.all_reduce_coalesced([]) is None

    def test_ranks_outside_the_group_are_warned_once_by_the_name_they_called(self) -> None:
        calls = {
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([np.ones(1), np.ones(1)], group=NOBODY),
            "all_gather_coalesced": lambda: dist.all_gather_coalesced([], [], group=NOBODY, async_op=True),
        }
        for name, call in calls.items():
            with pytest.warns(RuntimeWarning, match=rf"{name}\(\) does nothing") as warned:
                assert call() is None
            assert [warning.filename for warning in warned] == [__file__]
        with pytest.warns(RuntimeWarning, match=r"all_reduce\(\) does nothing") as warned, dist.batch(NOBODY) as batch:
            dist.all_reduce(np.ones(1), group=NOBODY)
        assert len(warned) == 1
        batch.wait()


# Several ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_batches_of_groups_in_several_threads(me: Me) -> None:
    me.init()
    groups = [dist.new_group() for _ in range(3)]

    def work_in(group: Any) -> None:
        for step in range(20):
            arrays = [np.full(count, float(me.rank + step)) for count in (3, 5)]
            with dist.batch(group):
                for array in arrays:
                    dist.all_reduce(array, group=group)
            assert all((array == 3 + 3 * step).all() for array in arrays)
        done.append(group)

    done = []
    threads = [threading.Thread(target=work_in, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 3
    dist.destroy_process_group()
