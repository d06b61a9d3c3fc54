"""What becomes of the calls of a batch: which are made one, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankmesh._collectives.coalescing import BatchedWork, RecordedCall, coalesce
from rankmesh_agent.group.options import Options
from rankmesh_agent.wire.ops import OpType, ReduceOp


def all_reduce(array: np.ndarray[Any, Any], op: ReduceOp = ReduceOp.SUM, after: Any = None) -> RecordedCall:
    return RecordedCall(
        (OpType.ALL_REDUCE, array.dtype, array.size, op), (array, op), Options(1.0, False, [array], after)
    )


def broadcast(array: np.ndarray[Any, Any], root: int = 0) -> RecordedCall:
    return RecordedCall(
        (OpType.BROADCAST, array.dtype, array.size, None, root), (array, root), Options(1.0, False, [array])
    )


BARRIER = RecordedCall((OpType.BARRIER,), (), Options(1.0))


def test_neighbouring_all_reduces_become_one() -> None:
    one, two, three = np.arange(3.0), np.zeros(0), np.full(4, 7.0)
    (call,) = coalesce([all_reduce(one), all_reduce(two), all_reduce(three)])
    array, op = call.arguments
    assert call.key == (OpType.ALL_REDUCE, np.dtype("f8"), 7, ReduceOp.SUM, None, None, "arrays of 3+0+4")
    assert op is ReduceOp.SUM
    np.testing.assert_array_equal(array, [0, 1, 2, 7, 7, 7, 7])
    assert [user is each for user, each in zip(call.options.result, (one, two, three), strict=True)] == [True] * 3


def test_the_result_goes_back_to_each_array_then_what_comes_after() -> None:
    seen: list[list[float]] = []
    one, two = np.zeros(2), np.zeros(3)
    (call,) = coalesce(
        [
            all_reduce(one, after=lambda: seen.append(one.tolist())),
            all_reduce(two, after=lambda: seen.append(two.tolist())),
        ]
    )
    call.arguments[0][:] = [1, 2, 3, 4, 5]
    assert not one.any(), "the arrays wait for the end"
    assert call.options.on_complete is not None
    call.options.on_complete()
    assert seen == [[1, 2], [3, 4, 5]]


def test_a_call_alone_is_made_as_it_is() -> None:
    calls = [all_reduce(np.ones(3)), broadcast(np.ones(3)), all_reduce(np.ones(3))]
    assert all(made is call for made, call in zip(coalesce(calls), calls, strict=True))
    assert coalesce([]) == []


@pytest.mark.parametrize(
    "between",
    [
        BARRIER,
        broadcast(np.ones(2)),
        all_reduce(np.ones(2, np.float32)),
        all_reduce(np.ones(2), ReduceOp.MAX),
        RecordedCall((OpType.ALL_TO_ALL, np.dtype("f8"), -1), ([np.ones(2)], [np.ones(2)]), Options(1.0)),
    ],
    ids=["barrier", "broadcast", "dtype", "op", "all_to_all"],
)
def test_what_differs_keeps_its_place(between: RecordedCall) -> None:
    first, second, last = all_reduce(np.ones(2)), all_reduce(np.ones(2)), all_reduce(np.ones(2))
    made = coalesce([between, first, second, between, last, between])
    assert [call.key[0] for call in made] == [
        between.key[0], OpType.ALL_REDUCE, between.key[0], OpType.ALL_REDUCE, between.key[0],
    ]  # fmt: skip
    assert made[1].key[2] == 4
    assert made[3] is last


def test_reductions_of_one_array_stay_one_after_the_other() -> None:
    whole = np.ones(4)
    for second in (whole, whole[2:], whole[:1]):
        made = coalesce([all_reduce(whole), all_reduce(np.ones(1)), all_reduce(second)])
        assert len(made) > 1
        assert made[-1].arguments[0] is second


@pytest.mark.parametrize(
    "ask",
    [
        BatchedWork.wait,
        BatchedWork.get_future_result,
        BatchedWork.is_completed,
        BatchedWork.is_success,
        BatchedWork.exception,
        BatchedWork.result,
        BatchedWork.get_future,
    ],
)
def test_a_call_in_a_batch_is_not_waited_for(ask: Any) -> None:
    with pytest.raises(RuntimeError, match="wait for the batch"):
        ask(BatchedWork())
