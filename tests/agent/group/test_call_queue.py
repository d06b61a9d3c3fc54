"""Queue of a group's calls against a model of it, and races that need real threads; executed by recording backends."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.attached import in_thread
from support.processes import wait_until

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.flight_recorder import FlightRecorder, error_text
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistBackendError, GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

SECONDS = 20.0
NOW, LATER = Options(SECONDS), Options(SECONDS, async_op=True)
BARRIER = (OpType.BARRIER,)
WORKER = "rankmesh-alone"


class RecordingBackend(Backend):
    """Runs the first argument of each call; logs the calls that it plans and runs."""

    name = "recorder"
    medium = "self"

    def __init__(self, log: list[tuple[Any, ...]], number: int = 0, device: str = "") -> None:
        self.log = log
        self.number = number
        self.device = device  # type: ignore[misc]  # a constant of other backends' classes

    def algorithm(self, call: Call) -> Algorithm:
        self.log.append(("plan", self.number, call.name))
        return lambda run=None, *rest: None if run is None else run()

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        seconds, worker = context.deadline.seconds, threading.current_thread().name == WORKER  # type: ignore[attr-defined]
        self.log.append(("run", self.number, context.seq, context.call.name, context.describe(), seconds, worker))
        algorithm(*arguments)

    def close(self) -> None:
        self.log.append(("close", self.number))


class Alone:
    """A group of one rank."""

    def __init__(self) -> None:
        self.engine = ProgressEngine(0, 1, 1, eager_limit=1024)
        self.state = LocalGroupState(self.engine, 1, "alone", (0,), {}, FlightRecorder())
        self.log: list[tuple[Any, ...]] = []
        self.queue = CallQueue(self.state, RecordingBackend(self.log))

    def close(self) -> None:
        self.state.mark_destroyed()
        self.queue.close()
        self.engine.close()

    def submit(self, run: Callable[[], Any] | None = None, options: Options = NOW, key: Any = BARRIER) -> Any:
        return self.queue.submit(key, (run, [np.zeros(3)]), options)


ON_GPU = (OpType.ALL_REDUCE, np.dtype("f4"), 64, ReduceOp.SUM, None, None, "", "cuda")
KEYS: dict[tuple[Any, ...], int] = {
    BARRIER: 0,
    (OpType.BROADCAST, np.dtype("u1"), 100, None, 0): 100,
    (OpType.ALL_REDUCE, np.dtype("f4"), 64, ReduceOp.SUM): 256,
    (OpType.ALL_TO_ALL, np.dtype("f8"), -1): 24,
    ON_GPU: 256,
}
"""Calls, and the bytes of each with the arguments of ``Alone.submit``."""
ERRORS: dict[str, Exception] = {
    "mismatch": CollectiveMismatchError("not the same"),
    "error": OSError("cable"),
    "lost rank": DistBackendError("rank 1 is gone", ranks=[1]),
    "on_complete": ValueError("no copy"),
}
CALLS = st.tuples(
    st.sampled_from(list(KEYS)),
    st.sampled_from(["", "", "", "use_backend", "on_complete", "mismatch", "error", "lost rank"]),
    st.booleans(),
    st.sampled_from([None, None, 0.0, 1e6]),
)
"""Key and outcome of a call, whether it is asynchronous, and its deadline in seconds."""
WITHDRAWN = DistBackendError("no longer wanted")
WAITS_FOR_ITSELF = RuntimeError("would wait for itself")
DESTROYED = GroupAbortedError("group 'alone' has been destroyed")


@dataclass
class Queued:
    """A call of the model, the Work or future of the real one, and its callback.

    Attributes:
        key, outcome: the call, and how its backend ends.
        label: its result and details.
        limit: seconds of its deadline, from its submission on, or those that it may take.
        work, withdrawn: the Work, or the future of a synchronous call in another thread.
        callback, calls: the callback, and the calls that it makes, a synchronous and an asynchronous one.
        following, returns: the callback's future; the value and error that the model expects of it.
    """

    key: tuple[Any, ...]
    label: str
    outcome: str
    limit: float
    work: Any = None
    withdrawn: bool = False
    callback: str = ""
    calls: tuple[Any, Any] = (None, None)
    following: Any = None
    returns: tuple[Any, Exception | None] = (None, None)


class Model:
    """The queue of a group, without threads."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.backends = {"": 0}
        self.plans: set[tuple[Any, ...]] = set()
        self.seq = 0
        self.failure: Exception | None = None
        self.active: Queued | None = None
        self.queued: list[Queued] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.records: list[tuple[int, str, str, int]] = []

    def place(self, key: tuple[Any, ...]) -> int:
        return self.backends.get(key[7] if len(key) > 7 else "", self.backends[""])

    def plan(self, key: tuple[Any, ...]) -> None:
        if key not in self.plans:
            self.plans.add(key)
            self.log.append(("plan", self.place(key), key[0].name.lower()))

    def use_backend(self, device: str, number: int) -> None:
        self.backends[device] = number
        self.plans.clear()

    def begin(self, call: Queued, worker: bool) -> None:
        self.seq += 1
        name, details = call.key[0].name.lower(), f"details of {call.label}"
        self.log.append(("run", self.place(call.key), self.seq, name, details, call.limit, worker))
        self.log.append(("body", call.label))

    def end(self, call: Queued) -> Exception | None:
        name, error, nbytes = call.key[0].name.lower(), ERRORS.get(call.outcome), KEYS[call.key]
        if call.outcome == "error":
            text = f"rank 0 gave up during {name} #{self.seq}: OSError cable"
            self.failure = self.failure or GroupAbortedError(text)
        elif call.outcome == "lost rank":
            self.failure = self.failure or error
        elif call.outcome != "mismatch":
            self.log.append(("complete", call.label))
        self.counts.update({(name, "calls"): 1, (name, "bytes"): nbytes, (name, "failures"): int(error is not None)})
        self.records.append((self.seq, name, "" if error is None else error_text(error), nbytes))
        return error

    def execute(self, call: Queued, worker: bool) -> Exception | None:
        """Execute a call; return its error."""
        self.plan(call.key)
        if self.failure is not None:
            return self.failure
        self.begin(call, worker)
        if call.outcome == "use_backend":
            self.use_backend("", 100 + self.seq)
        return self.end(call)

    def active_records(self) -> list[tuple[int, str]]:
        calls = [] if self.active is None else [self.active, *self.queued]
        return [(seq, call.key[0].name.lower()) for seq, call in enumerate(calls, self.seq)]


class CallQueueMachine(RuleBasedStateMachine):
    """Calls from threads and callbacks while the worker is idle, or held in a call until ``let_go``."""

    @initialize(held=st.booleans())
    def start(self, held: bool) -> None:
        self.group, self.model = Alone(), Model()
        self.labels = (f"call {number}" for number in itertools.count())
        self.numbers = itertools.count(1)
        self.held, self.release = threading.Event(), threading.Event()
        if held:
            self.hold()

    def submit(self, call: Queued, deadline: float | None = None, *, async_op: bool) -> Any:
        """Submit a call of the model to the queue."""

        def body() -> None:
            self.group.log.append(("body", call.label))
            if call.outcome == "hold":
                self.held.set()
                assert self.release.wait(SECONDS)
            elif call.outcome == "use_backend":
                self.group.queue.use_backend(RecordingBackend(self.group.log, 100 + self.group.state.seq))
            elif call.outcome in ERRORS and call.outcome != "on_complete":
                raise ERRORS[call.outcome]

        def complete() -> None:
            self.group.log.append(("complete", call.label))
            if call.outcome == "on_complete":
                raise ERRORS["on_complete"]

        until = None if deadline is None else Deadline(deadline)
        details = lambda: f"details of {call.label}"  # noqa: E731
        options = Options(SECONDS, async_op, [call.label], complete, details, until)
        return self.group.submit(body, options, call.key)

    def call(self, key: tuple[Any, ...] = BARRIER, outcome: str = "", limit: float = SECONDS) -> Queued:
        return Queued(key, next(self.labels), outcome, limit)

    def check(self, error: Exception | None, run: Callable[[], Any]) -> Any:
        """Run a call that raises this error, or none; return its result."""
        if error is None:
            return run()
        with pytest.raises(type(error)) as caught:
            run()
        assert getattr(error, "message", str(error)) in str(caught.value)
        assert error is not ERRORS["lost rank"] or caught.value.ranks == (1,)  # type: ignore[attr-defined]
        return None

    def ended(self, call: Queued, error: Exception | None) -> None:
        """Wait for a queued call, and check how it ended."""
        if isinstance(call.work, Future):
            assert self.check(error, lambda: call.work.result(SECONDS)) is None
            return
        assert self.check(error, lambda: call.work.wait(SECONDS)) is (None if error else True)
        assert self.check(error, call.work.result) == (None if error else [call.label])
        assert call.work.is_success() is (error is None)
        assert not call.work.withdraw(WITHDRAWN)

    def settle(self) -> None:
        """Let the worker go, and compare how each call ended with the model."""
        model, ended = self.model, list[tuple[Queued, Exception | None]]()
        self.release.set()
        if model.active is not None:
            call, model.active = model.active, None
            ended.append((call, model.end(call)))
            self.callback_of(call, ended)
        while model.queued:
            call = model.queued.pop(0)
            if not call.withdrawn:
                ended.append((call, model.execute(call, worker=True)))
                self.callback_of(call, ended)
        if self.group.queue._queued:  # a withdrawn call
            wait_until(lambda: not self.group.queue._queued, "the queue to be empty", SECONDS)
        for call, error in ended:
            self.ended(call, error)
            if call.callback:
                value, error = call.returns
                assert self.check(error, lambda call=call: call.following.wait(SECONDS)) is (None if error else value)

    def callback_of(self, call: Queued, ended: list[tuple[Queued, Exception | None]]) -> None:
        """Have the model run the callback of a call that ended."""
        model, (first, second) = self.model, call.calls
        if not call.callback or (call.callback == "release" and model.queued):
            call.returns = False, None
        elif call.callback == "call":
            model.plan(first.key)
            call.returns = None, WAITS_FOR_ITSELF
        elif call.callback == "release":
            call.returns = True, model.execute(first, worker=True)
            if model.failure is None:
                ended.append((second, model.execute(second, worker=True)))
        else:
            model.plan(second.key)
            call.returns = True, model.failure or (WAITS_FOR_ITSELF if call.callback == "wait" else None)
            if model.failure is None:
                model.queued.append(second)

    @rule(calls=st.lists(CALLS, min_size=1, max_size=4))
    def call_some(self, calls: list[tuple[Any, str, bool, float | None]]) -> None:
        for call in calls:
            self.call_one(*call)

    def call_one(self, key: Any, outcome: str, async_op: bool, deadline: float | None) -> None:
        model, held = self.model, self.model.active is not None
        call = self.call(key, outcome, SECONDS if deadline is None else deadline)
        if not async_op and not held:
            self.check(model.execute(call, worker=False), lambda: self.submit(call, deadline, async_op=False))
        else:
            model.plan(key)
            if model.failure is not None:
                self.check(model.failure, lambda: self.submit(call, deadline, async_op=True))
            elif async_op:
                call.work = self.submit(call, deadline, async_op=True)
                model.queued.append(call)
            else:  # behind the queued ones
                queued, before = self.group.queue._queued, len(self.group.queue._queued)
                call.work = in_thread(lambda: self.submit(call, deadline, async_op=False))
                wait_until(lambda: len(queued) > before, "the call to be queued", SECONDS)
                model.queued.append(call)
            if not held:
                self.settle()

    @rule(async_op=st.booleans())
    def call_an_undefined_reduction(self, async_op: bool) -> None:
        with pytest.raises(TypeError, match="BAND"):
            self.submit(self.call((OpType.ALL_REDUCE, np.dtype("f4"), 4, ReduceOp.BAND)), async_op=async_op)

    @precondition(lambda self: self.model.active is None and self.model.failure is None)
    @rule()
    def hold(self) -> None:
        call = self.model.active = self.call(ON_GPU, "hold")
        self.release.clear()
        self.model.plan(call.key)
        call.work = self.submit(call, async_op=True)
        self.model.begin(call, worker=True)
        assert self.held.wait(SECONDS)
        self.held.clear()
        assert not call.work.withdraw(WITHDRAWN)

    @precondition(lambda self: len(self.model.queued) > 1)
    @rule()
    def let_go(self) -> None:
        self.settle()

    def pick(self, number: int, calls: list[Queued]) -> Queued | None:
        """Return one of the asynchronous calls without a callback that are not withdrawn."""
        found = [call for call in calls if not (call.callback or call.withdrawn or isinstance(call.work, Future))]
        return found[number % len(found)] if found else None

    @precondition(lambda self: self.model.active is not None)
    @rule(number=st.integers(0, 5))
    def withdraw(self, number: int) -> None:
        call = self.pick(number, self.model.queued)
        if call is not None:
            assert call.work.withdraw(WITHDRAWN)
            call.withdrawn = True
            self.check(WITHDRAWN, lambda: call.work.wait(SECONDS))
            assert not call.work.withdraw(DESTROYED)

    @precondition(lambda self: self.model.active is not None)
    @rule(number=st.integers(0, 5), kind=st.sampled_from(["submit", "call", "wait", "release", "release"]))
    def add_callback(self, number: int, kind: str) -> None:
        assert self.model.active is not None
        call = self.pick(number, [self.model.active, *self.model.queued])
        if call is None:
            return
        call.callback, call.calls = kind, (self.call(), self.call())
        first, second = call.calls

        def callback(future: Any) -> bool:
            if kind == "release" and not future.release():
                return False
            if kind in ("call", "release"):
                self.submit(first, async_op=False)
            if kind != "call":
                second.work = self.submit(second, async_op=True)
            if kind in ("wait", "release"):
                second.work.wait(SECONDS)
            return True

        call.following = call.work.get_future().then(callback)

    @rule(device=st.sampled_from(["", "cuda"]))
    def use_backend(self, device: str) -> None:
        if not device or self.model.active is None:
            number = next(self.numbers)
            self.group.queue.use_backend(RecordingBackend(self.group.log, number, device))
            self.model.use_backend(device, number)

    @precondition(lambda self: self.model.failure is not None or self.model.seq + len(self.model.queued) > 12)
    @rule(held=st.booleans())
    def close(self, held: bool) -> None:
        model = self.model
        self.group.state.mark_destroyed()
        model.failure = model.failure or DESTROYED
        self.release.set()
        self.group.close()
        self.settle()
        model.log += [("close", model.backends[device]) for device in sorted(model.backends, reverse=True)]
        self.the_queue_is_as_the_model()
        assert WORKER not in [thread.name for thread in threading.enumerate()]
        for async_op in (False, True):
            self.check(model.failure, lambda async_op=async_op: self.submit(self.call(), async_op=async_op))
        self.start(held)

    @invariant()
    def the_queue_is_as_the_model(self) -> None:
        group, model = self.group, self.model
        assert group.log == model.log
        assert group.state.seq == model.seq
        records = group.state.recorder.records()
        assert [(record.seq, record.op, record.error, record.bytes) for record in records] == model.records
        assert [(record[2], record[1].name) for record in group.queue.active_records()] == model.active_records()
        counts: Counter[tuple[str, str]] = Counter()
        for op, stats in group.queue.op_stats().items():
            counts.update({(op, "calls"): sum(stats.buckets), (op, "bytes"): stats.nbytes})
            counts[op, "failures"] = stats.failures
        assert counts == model.counts

    def teardown(self) -> None:
        self.release.set()
        self.group.close()


TestCallQueue = pytest.mark.slow(CallQueueMachine.TestCase)
TestCallQueue.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None, database=None
)


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def held(alone: Alone) -> Iterator[threading.Event]:
    """The worker is busy with call number 1 until the event is set."""
    release = threading.Event()
    alone.submit(lambda: release.wait(SECONDS), LATER)
    try:
        yield release
    finally:
        release.set()


def test_a_queued_call_releases_its_arrays_when_it_ends(alone: Alone) -> None:
    def call() -> None:
        pass

    work, kept = alone.submit(call, LATER), weakref.ref(call)
    gc.disable()  # it must not take the collector of cycles
    try:
        assert work.wait(SECONDS)
        del call
        wait_until(lambda: kept() is None, "the arguments to be released", SECONDS)
    finally:
        gc.enable()


def test_calls_of_two_threads_never_overlap(alone: Alone) -> None:
    inside = threading.Lock()

    def alone_inside() -> None:
        assert inside.acquire(blocking=False), "two calls of a group at once"
        assert len(alone.queue.active_records()) >= 1
        inside.release()

    def call() -> None:
        for number in range(200):
            work = alone.submit(alone_inside, LATER if number % 3 == 0 else NOW)
            assert work is None or work.wait(SECONDS)

    for future in [in_thread(call) for _ in range(4)]:
        future.result(SECONDS)
    assert [event[2] for event in alone.log if event[0] == "run"] == list(range(1, 801))
    assert alone.state.failure is None
    assert sum(alone.queue.op_stats()["barrier"].buckets) == 800


def test_a_callback_may_wait_for_completed_work(alone: Alone, held: threading.Event) -> None:
    before, work = alone.submit(None, LATER), alone.submit(None, LATER)
    following = work.get_future().then(lambda _: before.wait())
    held.set()
    assert following.wait(SECONDS) is True


@pytest.mark.parametrize("calls", [True, False], ids=["replaced", "idle"])
def test_one_thread_is_left_after_a_release(alone: Alone, held: threading.Event, calls: bool) -> None:
    """If the callback makes another call, its thread ends and the new worker goes on; else either of them does."""
    workers: list[threading.Thread] = []

    def call() -> None:
        workers.append(threading.current_thread())

    def callback(future: Any) -> bool:
        free = future.release()
        if calls:
            alone.submit(call, LATER).wait(SECONDS)
        return bool(free)

    work = alone.submit(call, LATER)
    following = work.get_future().then(callback)
    held.set()
    assert following.wait(SECONDS)
    released = workers[0]
    if calls:
        wait_until(lambda: not released.is_alive(), "the released thread to end")
    for _ in range(3):
        alone.submit(call, LATER).wait(SECONDS)
    assert len(set(workers[-3:])) == 1
    assert not calls or set(workers[1:]) == {workers[-1]} != {released}
    alone.queue.close()
    wait_until(lambda: not any(worker.is_alive() for worker in workers), "the workers to end")
    assert work.get_future().release(), "any other thread holds up no call"


def test_plans_of_many_sizes_are_bounded(alone: Alone) -> None:
    for count in range(3000):
        alone.submit(None, NOW, (OpType.BROADCAST, np.dtype("u1"), count, None, 0))
    assert len(alone.queue._plans) <= 1024


def test_a_callback_may_close_its_group(alone: Alone, held: threading.Event) -> None:
    following = alone.submit(None, LATER).get_future().then(lambda _: alone.close())
    held.set()
    following.wait(SECONDS)
    assert ("close", 0) in alone.log


def test_an_asynchronous_launch_is_executed_at_once_if_it_is_alone(alone: Alone, held: threading.Event) -> None:
    threads: list[str] = []

    def launch() -> Any:
        call = BARRIER, (lambda: threads.append(threading.current_thread().name),), LATER
        return alone.queue.submit(*call, launches=True)

    queued = launch()
    assert queued is not None, "another call is under way"
    held.set()
    assert queued.wait(SECONDS)
    assert launch() is None
    assert threads == [WORKER, threading.current_thread().name]


def test_ctrl_c_in_a_queued_call_aborts_the_group(alone: Alone, held: threading.Event) -> None:
    """The worker must not go on with the caller's array."""
    ran: list[int] = []

    def interrupt() -> None:
        wait_until(lambda: len(alone.queue.active_records()) == 2, "the call to be queued")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupted = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        alone.submit(lambda: ran.append(1))
    interrupted.result(SECONDS)
    held.set()
    with pytest.raises(GroupAbortedError):
        alone.submit(lambda: ran.append(2))
    assert not ran
