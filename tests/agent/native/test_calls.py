"""Calls that the compiled core leaves to the Python code: it has done nothing then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.me import wait_until
from support.native_group import PLAIN, SLOT_BYTES, Group

from rankmesh_agent import native
from rankmesh_agent.collectives import all_reduce, all_to_all, barrier, scatter
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory import mapping, slots
from rankmesh_agent.shared_memory.mapping import futex_wait, timespec_of
from rankmesh_agent.wire.ops import OpType, ReduceOp

pytestmark = pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}")

FLOAT = np.dtype(np.float32)


SUM = OpType.ALL_REDUCE, FLOAT, 4, ReduceOp.SUM


def read_only() -> Any:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


NOT_KNOWN = {
    "strided": np.ones(8, np.float32)[::2],
    "2-D": np.ones((2, 2), np.float32),
    "longer": np.ones(5, np.float32),
    "other dtype": np.ones(4, np.int32),
    "other order": np.ones(4, ">f4"),
    "unaligned": np.ones(17, np.uint8)[1:].view(np.float32),
    "subclass": np.ones(4, np.float32).view(type("Other", (np.ndarray,), {})),
    "read-only": read_only(),
    "list": [1.0] * 4,
}


@pytest.mark.parametrize("array", NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_arrays_that_it_does_not_know(array: Any) -> None:
    group = Group()
    assert group.plan(SUM, all_reduce.small_segment)
    assert not group.carries_out(SUM, (array, ReduceOp.SUM))


@pytest.mark.parametrize(
    "options",
    [Options(30.0, async_op=True), Options(30.0, on_complete=print), Options(30.0, deadline=Deadline(3))],
    ids=["asynchronous", "staged", "queued"],
)
def test_options_that_it_does_not_know(options: Options) -> None:
    group = Group()
    group.plan(SUM, all_reduce.small_segment)
    assert not group.carries_out(SUM, (np.ones(4, np.float32), ReduceOp.SUM), options)


def be_queued(group: Group) -> None:
    group.queued.append("a call")


def be_taken(group: Group) -> None:
    group.turn.acquire()


def have_failed(group: Group) -> None:
    group.state.failure = ValueError()


def be_the_worker(group: Group) -> None:
    group.worker = threading.current_thread()


def be_closed(group: Group) -> None:
    group.calls.close()


@pytest.mark.parametrize("prepare", [be_queued, be_taken, have_failed, be_the_worker, be_closed])
def test_when_it_is_not_this_call_s_turn(prepare: Callable[[Group], None]) -> None:
    group = Group()
    group.plan(SUM, all_reduce.small_segment)
    prepare(group)
    assert not group.carries_out(SUM, (np.ones(4, np.float32), ReduceOp.SUM))


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        ((OpType.ALL_REDUCE, FLOAT, 1 << 16, ReduceOp.SUM), all_reduce.small_segment),
        ((OpType.SCATTER, FLOAT, SLOT_BYTES // 4, None, 0), scatter.over_segment),
        ((OpType.ALL_REDUCE, FLOAT, 4, ReduceOp.SUM), all_reduce.chunked_segment),
        ((OpType.ALL_GATHER, FLOAT, -1, None, None, (1, 2)), all_to_all.over_segment),
        ((OpType.ALL_REDUCE, FLOAT, 4, ReduceOp.SUM, None, None, "", "cuda"), all_reduce.small_segment),
    ],
    ids=["long", "longer than a lane", "several steps", "different lengths", "on a GPU"],
)
def test_plans_that_it_does_not_make(key: Any, algorithm: Callable[..., None]) -> None:
    assert not Group().plan(key, algorithm)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int64, np.float16, ml_dtypes.bfloat16, np.complex64, np.int8]
)
def test_what_it_carries_out(dtype: Any) -> None:
    group = Group()
    key = OpType.ALL_REDUCE, np.dtype(dtype), 4, ReduceOp.SUM
    assert group.plan(key, all_reduce.small_segment)
    array = np.ones(4, dtype)
    assert group.carries_out(key, (array, ReduceOp.SUM))
    assert (array == 1).all()  # rank 1's slot is zero
    assert group.plan((OpType.BARRIER,), barrier.over_segment)
    assert group.carries_out((OpType.BARRIER,), ())
    recorded = [(record[1].name, record[2], record[6]) for record in group.state.recorder.latest.copy()]
    assert recorded == [("all_reduce", 7, 4 * array.itemsize), ("barrier", 8, 0)]


def test_a_sleeper_is_woken() -> None:
    group = Group()
    group.plan((OpType.BARRIER,), barrier.over_segment)
    group.words[slots._SLEEPERS] = 1
    woken: list[float] = []
    futex = f"{mapping._FUTEX} "

    def sleep() -> None:
        began = time.monotonic()
        futex_wait(group.segment.mapping.address, 0, timespec_of(60.0))
        woken.append(time.monotonic() - began)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    wait_until(lambda: Path(f"/proc/self/task/{sleeper.native_id}/syscall").read_text().startswith(futex), "the sleep")
    assert group.carries_out((OpType.BARRIER,), ())
    sleeper.join()
    assert woken[0] < 50
    assert not group.words[slots._SLEEPERS]


def test_a_rank_that_does_not_come_is_left_to_python() -> None:
    """After one sleep, of which that rank knows, however often it changes its count."""
    group = Group()
    group.plan((OpType.BARRIER,), barrier.over_segment)
    group.segment._steps, group.words[8] = 1 << 20, 0
    threading.Thread(target=change_count, args=[group]).start()
    group.calls.submit((OpType.BARRIER,), (), PLAIN)
    assert [plan.call.kind for plan in group.handed_over] == [OpType.BARRIER]
    assert group.words[8 + slots._SLEEPERS] == 1


def change_count(group: Group) -> None:
    for number in range(10_000):
        if group.handed_over:
            return
        group.words[8] = number
        time.sleep(0.001)
    group.words[8] = 1 << 40
