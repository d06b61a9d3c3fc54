"""Work and Future, without ranks."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from support.processes import wait_until

from rankmesh_agent.group import work as work_module
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError


def call_of(operation="all_reduce"):
    """Return the Work of a call that has not begun."""
    return Work(operation, [], Future())


def message_of(complete, seconds=20.0, op="send"):
    """Return the Work of a message that ``complete`` completes."""
    return Work(op, [], message=SimpleNamespace(op=op, deadline=Deadline(seconds), complete=complete, source=lambda: 3))


def test_a_timeout_of_the_operation_itself_is_raised_as_it_is():
    work = call_of()
    work.end(CollectiveTimeoutError("rank 1 is missing", ranks=[1]))
    with pytest.raises(CollectiveTimeoutError, match="rank 1 is missing") as caught:
        work.wait(5)
    assert caught.value.ranks == (1,)


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

    work = message_of(settle)
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

    work = message_of(settle, 0.3)
    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told == [(1,)] * 3


def test_a_work_shows_its_operation_and_state():
    work = call_of()
    assert repr(work) == "<Work all_reduce, running>"
    work.end(None)
    assert repr(work) == "<Work all_reduce, done>"
    failed = call_of("barrier")
    failed.end(ZeroDivisionError("division by zero"))
    assert repr(failed) == "<Work barrier, failed: division by zero>"
    assert repr(message_of(lambda deadline: False)) == "<Work send, running>"
    message = message_of(lambda deadline: True, op="recv")
    message.wait()
    assert repr(message) == "<Work recv, done>"


@pytest.mark.parametrize(
    ("error", "result"),
    [(None, 0), (CollectiveTimeoutError("late"), 1), (DistBackendError("gone"), 2), (OSError("no"), 100)],
)
def test_a_future_of_torchs_result(error, result):
    work = call_of()
    future = work.get_future_result()
    work.end(error)
    assert future.wait(1) == result


# Messages with a future


def test_a_message_with_a_future_is_completed_though_no_thread_waits_for_it():
    arrived, looks = threading.Event(), []

    def complete(deadline):
        looks.append(threading.current_thread().name)
        return arrived.is_set()

    work = message_of(complete, op="recv")
    work._arrays = [7]
    future = work.get_future()
    following = future.then(lambda done: (done.value(), threading.current_thread().name, done.release()))
    assert not future.done()
    arrived.set()
    assert following.wait(20) == ([7], "rankmesh-messages", False)
    assert work.get_future() is future
    assert future.release(), "this thread completes no messages"
    assert set(looks[1:]) == {"rankmesh-messages"}
    wait_until(lambda: work_module._messages.thread is None, "the thread to end")


@pytest.mark.parametrize("error", [CollectiveTimeoutError("rank 1 is missing", ranks=[1]), OSError("no memory")])
def test_a_message_with_a_future_ends_with_its_error_at_its_deadline(error):
    def complete(deadline):
        if deadline is None:
            return False
        raise error

    with pytest.raises(type(error), match=str(error)):
        message_of(complete, 0.05).get_future().wait(20)


# await


def test_a_work_is_awaited_without_a_thread():
    async def run():
        work = call_of()
        before = threading.active_count()
        waits = [asyncio.ensure_future(work) for _ in range(10)]
        await asyncio.sleep(0)
        assert threading.active_count() == before
        threading.Timer(0.05, work.end, [None]).start()
        assert await asyncio.wait_for(asyncio.gather(*waits), 20) == [True] * 10
        assert await work is True, "at once"
        assert await work.get_future() == []

    asyncio.run(run())


def test_the_end_of_a_loop_does_not_disturb_the_thread_that_completes_the_operation(caplog):
    work, following = call_of(), []

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.01)

    asyncio.run(give_up())
    work.get_future().then(lambda done: following.append(done.value()))
    work.end(None)
    assert following == [[]]
    assert not caplog.records
