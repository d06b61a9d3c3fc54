"""What asynchronous calls return: Work and Future, of collectives and of messages."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks, wait_until

import rankmesh as dist

ONE = np.ones(1)


class TestAlone:
    """In a world of one rank."""

    pytestmark = pytest.mark.usefixtures("alone")

    def test_the_result_of_a_work_is_the_users_arrays_that_it_fills(self) -> None:
        array, output, other = np.arange(3.0), np.zeros(3), np.zeros(3)
        results = {
            dist.all_reduce(array, async_op=True): [array],
            dist.reduce(array, 0, async_op=True): [array],
            dist.broadcast(array, 0, async_op=True): [array],
            dist.all_gather([output], array, async_op=True): [output],
            dist.all_gather_single(output, array, async_op=True): [output],
            dist.gather(array, [output], 0, async_op=True): [output],
            dist.scatter(output, [array], 0, async_op=True): [output],
            dist.reduce_scatter(output, [array], async_op=True): [output],
            dist.reduce_scatter_single(output, array, async_op=True): [output],
            dist.all_to_all([output], [array], async_op=True): [output],
            dist.all_to_all_single(other, array, async_op=True): [other],
            dist.barrier(async_op=True): [],
        }
        for work, expected in results.items():
            assert work is not None
            assert work.wait() is True
            assert len(work.result()) == len(expected)
            assert all(one is wanted for one, wanted in zip(work.result(), expected, strict=True))
        np.testing.assert_array_equal(output, array)

    def test_a_future_has_the_value_of_the_work_and_calls_back(self) -> None:
        array = np.ones(3)
        work = dist.all_reduce(array, async_op=True)
        assert work is not None
        future = work.get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value().sum())
        assert future.wait(10)[0] is array
        assert future.done()
        assert future.value()[0] is array
        assert doubled.wait(10) == 6
        assert future.then(lambda done: "at once").value() == "at once"

    def test_an_error_in_a_callback_is_the_error_of_what_follows(self) -> None:
        work = dist.barrier(async_op=True)
        assert work is not None
        future = work.get_future()
        failing = future.then(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.wait(10)
        assert failing.done()
        with pytest.raises(ZeroDivisionError):
            failing.value()
        assert future.wait(10) == []

    def test_a_future_that_is_not_done_has_no_value(self) -> None:
        assert not dist.Future().done()
        with pytest.raises(RuntimeError, match=r"wait\(\)"):
            dist.Future().value()

    def test_synchronous_calls_come_after_the_asynchronous_ones_before_them(self) -> None:
        order: list[str] = []
        works = [dist.barrier(async_op=True) for _ in range(20)]
        for number, work in enumerate(works):
            assert work is not None
            work.get_future().then(lambda _, number=number: order.append(f"queued {number}"))
        dist.barrier()
        order.append("at once")
        wait_until(lambda: len(order) == 21, "all callbacks")
        # The last call's callbacks are called after its end, so maybe after the synchronous call.
        assert order.index("at once") >= 19
        order.remove("at once")
        assert order == [f"queued {number}" for number in range(20)]

    def test_a_synchronous_call_in_a_callback_is_refused(self) -> None:
        attached = threading.Event()
        first = dist.barrier(async_op=True)
        assert first is not None
        first.get_future().then(lambda _: attached.wait(10))
        second = dist.barrier(async_op=True)
        assert second is not None
        refused = second.get_future().then(lambda _: dist.all_reduce(np.ones(1)))
        attached.set()
        with pytest.raises(RuntimeError, match="all_reduce in a callback would wait for itself: use async_op=True"):
            refused.wait(10)
        dist.barrier()

    def test_wait_takes_a_timedelta_or_seconds(self) -> None:
        work = dist.barrier(async_op=True)
        assert work is not None
        for timeout in (None, 5, 0.5, timedelta(seconds=5)):
            assert work.wait(timeout) is True
        with pytest.raises(ValueError, match="timeout"):
            work.wait(-1)

    def test_a_receive_that_nobody_sends_to_is_under_way_until_its_time_is_over(self) -> None:
        group = dist.new_group([0], timeout=4)
        array = np.zeros(3)
        work = dist.irecv(array, group=group)
        assert work is not None
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(dist.CollectiveTimeoutError):
            work.wait(0.01)
        assert not work.is_completed(), "that was a shorter wait, the receive goes on"
        with pytest.raises(dist.CollectiveTimeoutError, match=r"waited 4\.0 s"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), dist.CollectiveTimeoutError)
        with pytest.raises(dist.CollectiveTimeoutError):
            work.result()
        dist.destroy_process_group(group)


# Several ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_works_of_messages(me: Me) -> None:
    me.init()
    group = dist.new_group([2, 0, 1], sort_ranks=False)  # its ranks are not the global ones
    small, large = 3, 300_000
    if me.rank == 0:
        gots = [np.zeros(count) for count in (small, large, small, large)]
        works = [
            dist.irecv(gots[0], src=1, tag=1),
            dist.irecv(gots[1], src=2, tag=2),
            dist.irecv(gots[2], tag=3, group=group),
            dist.irecv(gots[3], group_src=0, tag=4, group=group),
        ]
        assert not any(work.is_completed() or work.is_success() for work in works)
        late = me.attempt(works[0].wait, 0.01)
        assert late["error"] == "CollectiveTimeoutError", late
        me.mark("go")
        assert [work.wait() for work in works] == [True] * 4
        assert [work.source_rank() for work in works] == [1, 2, 1, 2]
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        assert all(work.result()[0] is got for work, got in zip(works, gots, strict=True))
        assert [got[-1] for got in gots] == [1, 2, 1, 2]
    else:
        me.wait_for("go")
        array = np.full(small if me.rank == 1 else large, float(me.rank))
        works = [dist.isend(array, 0, tag=me.rank), dist.isend(array, group_dst=1, tag=me.rank + 2, group=group)]
        for work in works:
            assert work.wait() is True
            assert work.is_success()
            assert work.result()[0] is array
            refused = me.attempt(work.source_rank)
            assert refused["error"] == "RuntimeError", refused
            assert "only known for a receive" in refused["text"]
            assert work.get_future().value()[0] is array
    strided = np.zeros((4, 4))
    if me.rank == 0:
        work = dist.irecv(strided[:, 1], src=1)
        me.mark("posted")
        wait_until(work.is_completed, "the receive to be complete")
        assert strided[:, 1].tolist() == [7, 7, 7, 7], "what is complete has been copied back"
        assert strided.sum() == 28
    elif me.rank == 1:
        me.wait_for("posted")
        dist.send(np.full(4, 7.0), 0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(2, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_works_of_collectives(me: Me) -> None:
    me.init()
    array = np.full(50_000, me.rank + 1.0)
    if me.rank == 0:
        work = dist.all_reduce(array, async_op=True)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        late = me.attempt(work.wait, 0.05)
        assert "did not end within 0.05 s of waiting; it goes on" in late["text"], late
        assert "result() before the operation is complete" in me.attempt(work.result)["text"]
        future = work.get_future()
        assert not future.done()
        assert me.attempt(future.wait, 0.01)["error"] == "TimeoutError"
        squared = future.then(lambda done: float(done.value()[0][0]) ** 2)
        me.mark("waiting")
        assert work.wait(30) is True
        assert squared.wait(30) == 9
    else:
        me.wait_for("waiting")
        dist.all_reduce(array)
    assert (array == 3).all()
    # A failure is the work's, its future's and what follows', again and again; the group goes on after a mismatch.
    work = dist.all_reduce(np.ones(2 + me.rank), async_op=True)
    following = work.get_future().then(lambda done: done.value())
    for ask in (work.wait, work.wait, work.result, work.get_future().wait, work.get_future().value, following.wait):
        assert me.attempt(ask)["error"] == "CollectiveMismatchError"
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), dist.CollectiveMismatchError)
    # A chain in which each call is made by the callback of the one before.
    steps = []

    def next_step(done: Any) -> Any:
        steps.append(done.value()[0][0])
        if len(steps) == 10:
            ended.set()
        else:
            dist.all_reduce(np.ones(1) * len(steps), async_op=True).get_future().then(next_step)

    ended = threading.Event()
    dist.all_reduce(np.zeros(1), async_op=True).get_future().then(next_step)
    assert ended.wait(20)
    assert steps == [2.0 * step for step in range(10)]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(2, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_works_are_awaited_in_an_event_loop(me: Me) -> None:
    me.init()

    async def total(request: int) -> float:
        array = np.full(1000, request * (me.rank + 1.0))
        assert await dist.all_reduce(array, async_op=True) is True
        return float(array[0])

    async def serve() -> None:
        assert await asyncio.gather(*(total(request) for request in range(5))) == [3.0 * step for step in range(5)]
        small, large = np.zeros(3), np.zeros(300_000)
        if me.rank == 0:
            first, second = dist.irecv(large, src=1, tag=1), dist.irecv(small, src=1, tag=2)
            me.mark("posted")
            assert await asyncio.gather(first, second) == [True, True]
            assert first.source_rank() == 1
            assert (small[0], large[-1]) == (2, 1)
        else:
            me.wait_for("posted")
            await asyncio.gather(dist.isend(large + 1, 0, tag=1), dist.isend(small + 2, 0, tag=2))
        with pytest.raises(dist.CollectiveMismatchError):
            await dist.all_reduce(np.ones(2 + me.rank), async_op=True)
        # A task that is cancelled leaves its call, which ends when the other rank makes it.
        array = np.ones(4)
        work = dist.all_reduce(array, async_op=True) if me.rank == 0 else None
        if work is not None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work, 0.05)
            me.mark("cancelled")
            assert await work
        else:
            me.wait_for("cancelled")
            dist.all_reduce(array)
        assert (array == 2).all()

    asyncio.run(serve())
    dist.destroy_process_group()
