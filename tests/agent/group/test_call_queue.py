"""The order of a group's calls: who carries them out, when, and what an error does; carried out by a recorder."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.processes import wait_until

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.call_queue import CallQueue, Options
from rankmesh_agent.group.coalescing import BatchedWork
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.pending import LocalActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistBackendError, GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType

SECONDS = 20.0
NOW, LATER = Options(SECONDS), Options(SECONDS, async_op=True)
BARRIER = (OpType.BARRIER,)


class RecordingBackend(Backend):
    """Runs the call's first argument, if it has one, and notes every call."""

    name = "recorder"
    medium = "self"

    def __init__(self) -> None:
        self.planned: list[Call] = []
        self.ran: list[tuple[int, str, threading.Thread]] = []
        self.notes: list[str] = []
        self.closed = 0

    def algorithm(self, call: Call) -> Algorithm:
        self.planned.append(call)
        return lambda run=None, *rest: None if run is None else run()

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        self.ran.append((context.seq, context.call.name, threading.current_thread()))
        self.notes.append(context.describe())
        algorithm(*arguments)

    def close(self) -> None:
        self.closed += 1


class Alone:
    """A group of one rank."""

    def __init__(self) -> None:
        self.mesh = ProgressEngine(0, 1, {}, eager_limit=1024)
        self.state = LocalGroupState(self.mesh, 1, "alone", (0,), {}, FlightRecorder())
        self.backend = RecordingBackend()
        self.queue = CallQueue(self.state, LocalActiveCall(self.state), "alone", self.backend)

    def close(self) -> None:
        self.state.mark_destroyed()
        self.queue.close()
        self.mesh.close()

    def submit(self, run: Callable[[], Any] | None = None, options: Options = NOW, key: Any = BARRIER) -> Any:
        return self.queue.submit(key, (run,), options)


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


def fail(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


# Who carries a call out, and when


def test_a_synchronous_call_with_nothing_queued_runs_in_the_callers_thread(alone: Alone) -> None:
    assert alone.submit() is None
    assert alone.submit() is None
    here = threading.current_thread()
    assert alone.backend.ran == [(1, "barrier", here), (2, "barrier", here)]
    assert (alone.state.seq, alone.state.call.name) == (2, "barrier")


def test_asynchronous_calls_run_in_one_worker_in_the_order_they_were_made(alone: Alone) -> None:
    done: list[int] = []
    works = [alone.submit(lambda number=number: done.append(number), LATER) for number in range(50)]
    for work in works:
        assert work.wait(SECONDS)
    assert done == list(range(50))
    assert [seq for seq, _, _ in alone.backend.ran] == list(range(1, 51))
    workers = {thread for _, _, thread in alone.backend.ran}
    assert len(workers) == 1
    assert workers.pop().name == "rankmesh-alone"


def test_a_synchronous_call_waits_its_turn_behind_the_queued_ones(alone: Alone, held: threading.Event) -> None:
    done: list[str] = []
    alone.submit(lambda: done.append("queued"), LATER)
    threading.Timer(0.05, held.set).start()
    alone.submit(lambda: done.append("at once"))
    assert done == ["queued", "at once"]
    assert [seq for seq, _, _ in alone.backend.ran] == [1, 2, 3]


def test_a_queued_call_that_is_withdrawn_is_not_made(alone: Alone, held: threading.Event) -> None:
    done: list[str] = []
    first = alone.submit(lambda: done.append("first"), LATER)
    second = alone.submit(lambda: done.append("second"), LATER)
    assert first.withdraw(DistBackendError("nobody wants it any more"))
    held.set()
    assert second.wait(SECONDS)
    assert done == ["second"]
    assert [seq for seq, _, _ in alone.backend.ran] == [1, 2]
    assert not second.withdraw(DistBackendError("too late"))
    with pytest.raises(DistBackendError, match="nobody wants it"):
        first.wait()


def test_a_queued_call_lets_go_of_its_arrays_when_it_is_over(alone: Alone) -> None:
    def call() -> None:
        pass

    work, kept = alone.submit(call, LATER), weakref.ref(call)
    gc.disable()  # it must not take the collector of cycles
    try:
        assert work.wait(SECONDS)
        del call
        wait_until(lambda: kept() is None, "the arguments to be let go of", SECONDS)
    finally:
        gc.enable()


def test_a_queued_call_with_a_deadline_has_what_is_left_of_it_when_its_turn_comes(
    alone: Alone, held: threading.Event
) -> None:
    seconds: list[float] = []

    def look() -> None:
        seconds.append(alone.queue._active.deadline.seconds)

    alone.submit(look, LATER._replace(deadline=Deadline(SECONDS / 2)))
    passed = alone.submit(look, LATER._replace(deadline=Deadline(0.0)))
    held.set()
    assert passed.wait(SECONDS)
    assert 0 < seconds[0] < SECONDS / 2
    assert seconds[1] == 0


def test_calls_of_two_threads_never_overlap(alone: Alone) -> None:
    inside = threading.Lock()

    def alone_inside() -> None:
        assert inside.acquire(blocking=False), "two calls of a group at once"
        inside.release()

    def call() -> None:
        for number in range(200):
            work = alone.submit(alone_inside, LATER if number % 3 == 0 else NOW)
            assert work is None or work.wait(SECONDS)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert alone.state.seq == 800
    assert sorted(seq for seq, _, _ in alone.backend.ran) == list(range(1, 801))
    assert alone.state.failure is None


def test_after_runs_when_the_data_is_there(alone: Alone) -> None:
    done: list[str] = []
    options = NOW._replace(on_complete=lambda: done.append("after"))
    alone.submit(lambda: done.append("data"), options)
    alone.submit(lambda: done.append("data"), options._replace(async_op=True)).wait(SECONDS)
    assert done == ["data", "after", "data", "after"]


def test_the_note_of_a_call_is_only_asked_for_by_the_backend(alone: Alone) -> None:
    alone.submit(None, NOW._replace(details=lambda: "float32 (2, 3)"))
    alone.submit()
    assert alone.backend.notes == ["float32 (2, 3)", ""]


def test_the_result_of_a_work_is_the_users_arrays(alone: Alone) -> None:
    array = np.ones(3)
    work = alone.submit(None, LATER._replace(result=[array]))
    work.wait(SECONDS)
    assert work.result()[0] is array


# Calls out of callbacks


def test_a_synchronous_call_in_a_callback_is_refused(alone: Alone, held: threading.Event) -> None:
    work = alone.submit(None, LATER)
    following = work.get_future().then(lambda _: alone.submit())
    held.set()
    with pytest.raises(RuntimeError, match=r"a synchronous barrier in a callback would wait for itself: use async_op"):
        following.wait(SECONDS)
    alone.submit()


def test_an_asynchronous_call_in_a_callback_comes_behind_the_others(alone: Alone, held: threading.Event) -> None:
    done: list[str] = []
    first = alone.submit(None, LATER)
    following = first.get_future().then(lambda _: alone.submit(lambda: done.append("callback's"), LATER))
    alone.submit(lambda: done.append("queued"), LATER)
    held.set()
    following.wait(SECONDS).wait(SECONDS)
    assert done == ["queued", "callback's"]


@pytest.mark.parametrize(
    "wait", [lambda work: work.wait(), lambda work: work.get_future().wait()], ids=["work", "future"]
)
def test_waiting_in_a_callback_for_a_later_call_is_refused(alone: Alone, held: threading.Event, wait: Any) -> None:
    first = alone.submit(None, LATER)
    following = first.get_future().then(lambda _: wait(alone.submit(None, LATER)))
    held.set()
    with pytest.raises(RuntimeError, match="would wait for itself"):
        following.wait(SECONDS)


def test_a_callback_may_wait_for_what_is_complete(alone: Alone, held: threading.Event) -> None:
    before, work = alone.submit(None, LATER), alone.submit(None, LATER)
    following = work.get_future().then(lambda _: before.wait())
    held.set()
    assert following.wait(SECONDS) is True


def test_a_callback_that_is_released_may_do_all_that(alone: Alone, held: threading.Event) -> None:
    work = alone.submit(None, LATER)
    done: list[str] = []

    def callback(future: Any) -> bool:
        free = future.release()
        alone.submit(lambda: done.append("now"))
        alone.submit(lambda: done.append("later"), LATER).wait(SECONDS)  # by another thread
        return bool(free)

    following = work.get_future().then(callback)
    held.set()
    assert following.wait(SECONDS)
    assert done == ["now", "later"]
    callbacks, others = alone.backend.ran[-2][2], alone.backend.ran[-1][2]
    assert others is not callbacks
    wait_until(lambda: not callbacks.is_alive(), "the thread that was let go of to end: there is another one")
    alone.submit(None, LATER).wait(SECONDS)
    assert alone.backend.ran[-1][2] is others


def test_a_callback_with_calls_queued_behind_it_is_not_released(alone: Alone, held: threading.Event) -> None:
    work = alone.submit(None, LATER)
    following = work.get_future().then(lambda future: future.release())
    behind = alone.submit(None, LATER)
    held.set()
    assert following.wait(SECONDS) is False
    behind.wait(SECONDS)


def test_a_thread_that_was_released_goes_on_if_there_is_no_other(alone: Alone, held: threading.Event) -> None:
    work = alone.submit(None, LATER)
    released = work.get_future().then(lambda future: (future.release(), threading.current_thread()))
    held.set()
    free, worker = released.wait(SECONDS)
    assert free
    for _ in range(3):
        alone.submit(None, LATER).wait(SECONDS)
    alone.queue.close()
    wait_until(lambda: not worker.is_alive(), "the thread to end, whether another one took its place or not")
    assert work.get_future().release()  # any other thread holds nothing up


# Errors


@pytest.mark.parametrize("options", [NOW, LATER], ids=["now", "later"])
def test_an_error_half_way_ends_the_group(alone: Alone, options: Options) -> None:
    with pytest.raises(OSError, match="cable"):
        (alone.submit(fail(OSError("cable")), options) or alone).wait()  # type: ignore[union-attr]
    for again in (NOW, LATER):
        with pytest.raises(GroupAbortedError, match=r"gave up during barrier #1: OSError cable"):
            alone.submit(None, again)
    assert alone.state.seq == 1, "calls of a group that ended have no number"


def test_a_mismatch_leaves_the_group_usable_and_the_arrays_alone(alone: Alone) -> None:
    done: list[str] = []
    with pytest.raises(CollectiveMismatchError):
        alone.submit(
            fail(CollectiveMismatchError("not the same")), NOW._replace(on_complete=lambda: done.append("after"))
        )
    assert not done
    alone.submit()
    assert alone.state.seq == 2


def test_what_is_queued_behind_a_failure_fails_with_it(alone: Alone, held: threading.Event) -> None:
    failing = alone.submit(fail(DistBackendError("rank 1 is gone", ranks=[1])), LATER)
    behind = alone.submit(None, LATER)
    held.set()
    for work in (failing, behind):
        with pytest.raises(DistBackendError, match="rank 1 is gone") as caught:
            work.wait(SECONDS)
        assert caught.value.ranks == (1,)
    assert len(alone.backend.ran) == 2, "the call behind has not been tried"


# Plans


def test_a_call_is_planned_once_until_the_backend_changes(alone: Alone) -> None:
    for _ in range(3):
        alone.submit()
    assert len(alone.backend.planned) == 1
    other = RecordingBackend()
    alone.queue.use_backend(other)
    alone.submit()
    assert [call.name for call in other.planned] == ["barrier"]
    assert len(other.ran) == 1


def test_plans_of_ever_new_sizes_do_not_pile_up(alone: Alone) -> None:
    for count in range(3000):
        alone.submit(None, NOW, (OpType.BROADCAST, np.dtype("u1"), count, None, 0))
    assert len(alone.queue._plans) <= 1024


# Batches


def test_calls_of_an_open_batch_are_recorded_not_made(alone: Alone) -> None:
    alone.queue.open_batch()
    array = np.ones(2)
    assert alone.submit(None, NOW._replace(result=[array])) is None
    assert isinstance(alone.submit(None, LATER), BatchedWork)
    recorded = alone.queue.close_batch()
    assert [call.key for call in recorded] == [BARRIER, BARRIER]
    assert recorded[0].result[0] is array
    assert not alone.backend.ran
    alone.submit()
    assert alone.state.seq == 1


def test_a_batch_is_its_threads_own(alone: Alone) -> None:
    alone.queue.open_batch()
    other = threading.Thread(target=alone.submit)
    other.start()
    other.join(SECONDS)
    assert len(alone.backend.ran) == 1
    assert not alone.queue.close_batch()


def test_batches_do_not_nest(alone: Alone) -> None:
    alone.queue.open_batch()
    with pytest.raises(RuntimeError, match="already open for group 'alone'"):
        alone.queue.open_batch()
    alone.queue.close_batch()
    alone.queue.open_batch()
    assert alone.queue.close_batch() == []


# The end


def test_closing_ends_the_worker_and_the_backend(alone: Alone) -> None:
    alone.submit(None, LATER).wait(SECONDS)
    worker = alone.backend.ran[0][2]
    alone.close()
    assert not worker.is_alive()
    assert alone.backend.closed == 1
    with pytest.raises(GroupAbortedError, match="has been destroyed"):
        alone.submit()
    with pytest.raises(GroupAbortedError, match="has been destroyed"):
        alone.submit(None, LATER)


def test_a_callback_may_close_its_group(alone: Alone, held: threading.Event) -> None:
    work = alone.submit(None, LATER)
    following = work.get_future().then(lambda _: alone.close())
    held.set()
    following.wait(SECONDS)
    assert alone.backend.closed == 1


def test_a_call_goes_behind_what_is_queued_also_while_none_runs(alone: Alone) -> None:
    alone.submit(options=LATER).wait()
    alone.order._queued.append(object())  # type: ignore[arg-type]  # the worker is about to carry it out
    alone.submit()
    assert alone.backend.ran[-1][2] is not threading.current_thread()
