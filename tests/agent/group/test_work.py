"""Work and Future, without ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from rankmesh_agent.group import work as work_module
from rankmesh_agent.group.work import Future, MessageWork, QueuedWork
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError


def test_a_work_that_fails_has_its_error():
    def fail():
        raise OSError("no")

    work = QueuedWork(fail, [], "all_reduce")
    assert not work.is_completed()
    work.run()
    assert work.is_completed()
    assert isinstance(work.exception(), OSError)


@pytest.mark.parametrize("timeout", [0.01, timedelta(milliseconds=10)])
def test_waiting_too_long_is_a_timeout_and_the_operation_goes_on(timeout):
    work = QueuedWork(lambda: None, [], "all_reduce")
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce did not end within 0\.01 s"):
        work.wait(timeout)
    work.run()
    assert work.wait(timeout)


def test_a_timeout_of_the_operation_itself_is_raised_as_it_is():
    def late():
        raise CollectiveTimeoutError("rank 1 is missing", ranks=[1])

    work = QueuedWork(late, [], "all_reduce")
    work.run()
    with pytest.raises(CollectiveTimeoutError, match="rank 1 is missing") as caught:
        work.wait(5)
    assert caught.value.ranks == (1,)


def test_the_result_of_an_operation_under_way_is_not_to_be_had():
    with pytest.raises(RuntimeError, match=r"call wait\(\) first"):
        QueuedWork(lambda: None, [], "all_reduce").result()


def test_only_receives_have_a_source():
    with pytest.raises(RuntimeError, match="source_rank"):
        QueuedWork(lambda: None, [], "all_reduce").source_rank()


def test_callbacks_run_in_order_before_or_after_the_end():
    future, seen = Future(), []
    first = future.then(lambda done: seen.append(("first", done.value())) or 7)
    second = first.then(lambda done: done.value() + 1)
    assert not second.done()
    future.set_result(3)
    late = future.then(lambda done: seen.append(("late", done.value())))
    assert late.done()
    assert second.wait(1) == 8
    assert seen == [("first", 3), ("late", 3)]


def test_an_error_travels_along_the_callbacks():
    future = Future()
    following = future.then(lambda done: done.value())
    future.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        following.wait(1)


def test_a_future_wakes_those_who_wait():
    future = Future()
    threading.Timer(0.05, future.set_result, [1]).start()
    assert future.wait(10) == 1
    with pytest.raises(TimeoutError):
        Future().wait(0.01)


@pytest.mark.parametrize("error", [None, DistBackendError("rank 1 is gone", ranks=[1])], ids=["done", "failed"])
def test_one_of_the_threads_that_wait_for_a_message_settles_it(error):
    """What follows once the data is there is done once, and before any of them goes on."""
    begun, go, settled, ended = threading.Event(), threading.Event(), [], []

    def settle(deadline):
        settled.append(deadline)
        begun.set()
        assert go.wait(20)
        if error is not None:
            raise error
        return True

    def wait():
        try:
            work.wait()
        except DistBackendError as raised:
            ended.append(raised)
        else:
            ended.append(None)

    work = MessageWork(settle, [], Deadline(20))
    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeoutError, match=r"did not end within 0\.01 s of waiting; another thread"):
        work.wait(0.01)
    assert not ended
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(settled) == 1
    assert list(map(repr, ended)) == [repr(error)] * 3
    assert work.is_completed()
    assert repr(work.exception()) == repr(error)


def test_all_threads_that_wait_for_a_message_are_told_why_it_did_not_come_in_time(monkeypatch):
    """Also those that do not find out themselves, and whose own clock says before that it is too late."""
    monkeypatch.setattr(work_module, "_GRACE_SECONDS", 20.0)
    told = []

    def settle(deadline):
        time.sleep(deadline.remaining() + 0.1)
        raise CollectiveTimeoutError("rank 1 is missing", ranks=[1])

    def wait():
        with pytest.raises(CollectiveTimeoutError) as late:
            work.wait()
        told.append(late.value.ranks)

    work = MessageWork(settle, [], Deadline(0.3))
    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told == [(1,)] * 3


def test_a_work_shows_its_operation_and_state():
    work = QueuedWork(lambda: None, [], "all_reduce")
    assert repr(work) == "<Work all_reduce, running>"
    work.run()
    assert repr(work) == "<Work all_reduce, done>"
    failed = QueuedWork(lambda: 1 / 0, [], "barrier")
    failed.run()
    assert repr(failed) == "<Work barrier, failed: division by zero>"
    assert repr(MessageWork(lambda deadline: False, [], Deadline(1))) == "<Work send, running>"
    message = MessageWork(lambda deadline: True, [], Deadline(1), lambda: 3)
    message.wait()
    assert repr(message) == "<Work recv, done>"
