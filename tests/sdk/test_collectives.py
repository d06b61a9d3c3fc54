"""The collectives' arguments, and what they do in a world of one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import rankmesh as dist

pytestmark = pytest.mark.usefixtures("alone")

OPS = list(dist.ReduceOp)
NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def read_only() -> np.ndarray:
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("make", [lambda: np.arange(6.0), lambda: np.arange(12.0)[::2], lambda: np.array(4)])
def test_all_reduce_of_one_rank_changes_nothing(op: dist.ReduceOp, make: Any) -> None:
    array = make()
    assert dist.all_reduce(array, op=op) is None
    np.testing.assert_array_equal(array, make())


def test_broadcast_of_one_rank_changes_nothing() -> None:
    array = np.arange(5)
    assert dist.broadcast(array, src=0) is None
    assert dist.broadcast(read_only(), src=0) is None, "the source is only read"
    np.testing.assert_array_equal(array, np.arange(5))


@pytest.mark.parametrize("make", [lambda: np.zeros(6), lambda: np.zeros(12)[::2], lambda: np.zeros((2, 3)).T])
def test_all_gather_of_one_rank_copies(make: Any) -> None:
    output = make()
    assert dist.all_gather([output], read_only().repeat(2)) is None
    assert (output == 1).all()


def test_all_gather_takes_any_sequence() -> None:
    output = np.zeros(2)
    dist.all_gather((output,), np.ones(2))
    assert (output == 1).all()


def test_barrier_of_one_rank_returns() -> None:
    assert dist.barrier() is None
    assert dist.barrier(device_ids=[0]) is None


# Arguments


@pytest.mark.parametrize("tensor", [[1.0], None, 3, "x", np.array(["a"]), np.array([None])], ids=repr)
def test_what_is_no_array_of_numbers_is_refused(tensor: Any) -> None:
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather([np.ones(1)], tensor),
    ):
        with pytest.raises(TypeError, match="tensor"):
            call()
    with pytest.raises(TypeError, match=r"tensor_list\[0\]"):
        dist.all_gather([tensor], np.ones(1))


def test_read_only_arrays_are_refused_where_they_are_written() -> None:
    with pytest.raises(ValueError, match="tensor is read-only"):
        dist.all_reduce(read_only())
    with pytest.raises(ValueError, match=r"tensor_list\[0\] is read-only"):
        dist.all_gather([read_only()], np.ones(3))


@pytest.mark.parametrize("op", ["SUM", 0, None, np.add])
def test_what_is_no_reduce_op_is_refused(op: Any) -> None:
    with pytest.raises(TypeError, match="ReduceOp"):
        dist.all_reduce(np.ones(1), op=op)


@pytest.mark.parametrize("op", [dist.ReduceOp.MIN, dist.ReduceOp.MAX])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_have_no_order(op: dist.ReduceOp, dtype: str) -> None:
    with pytest.raises(TypeError, match="no order"):
        dist.all_reduce(np.ones(2, dtype), op=op)


@pytest.mark.parametrize("src", [1, -1, 100, None, "0"])
def test_a_source_outside_the_group_is_refused(src: Any) -> None:
    with pytest.raises(ValueError, match=r"src=.* is not in the group, whose ranks are \[0\]"):
        dist.broadcast(np.ones(1), src=src)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_list_of_another_length_than_the_group_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_list has {count} arrays, but the group has 1"):
        dist.all_gather([np.ones(1)] * count, np.ones(1))


@pytest.mark.parametrize("output", [np.zeros(4), np.zeros(3, np.float32), np.zeros(3, np.int64), np.zeros(0)])
def test_outputs_of_another_size_or_dtype_are_refused(output: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"tensor_list\[0\] is .* but tensor is float64\[3\]"):
        dist.all_gather([output], np.ones(3))
    assert not output.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: dist.all_reduce(np.ones(1), **options),
        lambda **options: dist.broadcast(np.ones(1), 0, **options),
        lambda **options: dist.all_gather([np.ones(1)], np.ones(1), **options),
        lambda **options: dist.barrier(**options),
    ],
    ids=["all_reduce", "broadcast", "all_gather", "barrier"],
)
class TestEveryCollective:
    def test_takes_a_timedelta_or_seconds(self, call: Any) -> None:
        for timeout in (timedelta(seconds=5), 5, 0.5, None):
            call(timeout=timeout)

    @pytest.mark.parametrize("timeout", [-1, timedelta(seconds=-1), float("nan")])
    def test_refuses_a_negative_timeout(self, call: Any, timeout: Any) -> None:
        with pytest.raises(ValueError, match="timeout"):
            call(timeout=timeout)

    @pytest.mark.parametrize("group", ["world", 0, object()])
    def test_refuses_what_is_no_group(self, call: Any, group: Any) -> None:
        with pytest.raises(TypeError, match="ProcessGroup"):
            call(group=group)

    def test_does_nothing_at_ranks_outside_the_group(self, call: Any) -> None:
        assert call(group=NOBODY) is None
        assert call(group=NOBODY, async_op=True) is None

    def test_gives_a_work_when_asynchronous(self, call: Any) -> None:
        work = call(async_op=True)
        assert isinstance(work, dist.Work)
        assert work.wait() is True
        assert work.wait(timeout=1) is True, "again"
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


# Work and Future


def test_the_result_of_a_work_is_the_users_arrays() -> None:
    array, output = np.arange(3.0), np.zeros(3)
    work = dist.all_reduce(array, async_op=True)
    work.wait()
    (result,) = work.result()
    assert result is array
    work = dist.all_gather([output], array, async_op=True)
    work.wait()
    assert work.result()[0] is output
    np.testing.assert_array_equal(output, array)
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.result() == []


def test_a_strided_array_is_filled_when_wait_returns() -> None:
    whole = np.zeros(6)
    work = dist.all_gather([whole[::2]], np.ones(3), async_op=True)
    work.wait()
    np.testing.assert_array_equal(whole, [1, 0] * 3)


def test_a_future_has_the_value_of_the_work_and_calls_back() -> None:
    array = np.ones(3)
    future = dist.all_reduce(array, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value().sum())
    assert future.wait(10)[0] is array
    assert future.done()
    assert future.value()[0] is array
    assert doubled.wait(10) == 6
    assert future.then(lambda done: "at once").value() == "at once"


def test_an_error_in_a_callback_is_the_error_of_what_follows() -> None:
    future = dist.barrier(async_op=True).get_future()
    failing = future.then(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.wait(10)
    assert failing.done()
    with pytest.raises(ZeroDivisionError):
        failing.value()
    assert future.wait(10) == []


def test_only_a_receive_has_a_source() -> None:
    work = dist.barrier(async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="receive"):
        work.source_rank()


def test_synchronous_calls_come_after_the_asynchronous_ones_before_them() -> None:
    order: list[str] = []
    works = [dist.barrier(async_op=True) for _ in range(20)]
    for number, work in enumerate(works):
        work.get_future().then(lambda _, number=number: order.append(f"queued {number}"))
    dist.barrier()
    order.append("at once")
    assert order == [*(f"queued {number}" for number in range(20)), "at once"]
