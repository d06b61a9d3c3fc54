"""Calls that the compiled core leaves to the Python code: it has done nothing then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rankmesh_agent import native
from rankmesh_agent.collectives import all_reduce, all_to_all, barrier, scatter
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.native_calls import NativeCalls
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

pytestmark = pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}")

SLOT_BYTES = 1 << 17
FLOAT = np.dtype(np.float32)
PLAIN = Options(30.0)


class State(object if native.core is None else native.core.State):  # type: ignore[misc]
    """A group's state, as far as the core looks at it."""

    global_ranks = 0, 1

    def __init__(self) -> None:
        self.seq, self.nbytes = 6, 0
        self.call: Call | None = None
        self.failure: Exception | None = None
        self.started_at: float | None = None
        self.recorder = FlightRecorder()


class Group:
    """Rank 0 of two in their memory, and its queue; rank 1 has made all calls ahead."""

    def __init__(self) -> None:
        mapping = Mapping.anonymous(Segment.bytes_for(2, SLOT_BYTES))
        self.segment = Segment(mapping, 0, 2, SLOT_BYTES, False)
        self.words = mapping.bytes.data[:128].cast("Q")
        self.memory = mapping.bytes
        self.state = State()
        self.worker: threading.Thread | None = None
        self.queued: deque[Any] = deque()
        self.turn = threading.Lock()
        self.plans: dict[Any, Any] = {}
        self.left: list[Any] = []
        assert native.core is not None
        shared = self.plans, self.queued, self.turn
        self.calls = NativeCalls(native.core, self, self.state, self.segment, shared)  # type: ignore[arg-type]

    def submit(self, key: Any, arguments: Any, options: Options, *, launches: bool) -> None:
        self.left.append(key)

    def plan(self, key: tuple[Any, ...], algorithm: Callable[..., None]) -> bool:
        """Plan a call of both ranks; return whether the core knows it."""
        call = Call(*key)
        plan = self.calls.plan_of(call, algorithm)
        self.plans[key] = (call, algorithm, None, 0, None, plan)
        self.words[8] = 1 << 40
        self.words[9] = self.words[10] = call.fingerprint
        return plan is not None

    def carries_out(self, key: tuple[Any, ...], arguments: tuple[Any, ...], options: Options = PLAIN) -> bool:
        before = self.memory.tobytes(), self.segment._steps, self.segment._turn, self.state.seq
        self.calls.submit(key, arguments, options)
        after = self.memory.tobytes(), self.segment._steps, self.segment._turn, self.state.seq
        if self.left:
            assert self.left == [key]
            assert after == before
            return False
        assert after[1:] == (before[1] + 1, before[2] ^ (key[0] is not OpType.BARRIER), before[3] + 1)
        assert not self.turn.locked()
        assert self.state.started_at is None
        return True


SUM = OpType.ALL_REDUCE, FLOAT, 4, ReduceOp.SUM


def read_only() -> Any:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.ones(8, np.float32)[::2],
        np.ones((2, 2), np.float32),
        np.ones(5, np.float32),
        np.ones(4, np.int32),
        np.ones(4, ">f4"),
        np.ones(17, np.uint8)[1:].view(np.float32),
        np.ones(4, np.float32).view(type("Other", (np.ndarray,), {})),
        read_only(),
        [1.0] * 4,
    ],
    ids=["strided", "2-D", "longer", "other dtype", "other order", "unaligned", "subclass", "read-only", "list"],
)
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
