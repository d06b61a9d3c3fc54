"""Waits for keys that a failure ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.processes import wait_until

from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Add, Get, MultiGet, QueuePop, QueuePush, Set, Wait
from rankmesh_agent.wire.errors import QueueEmptyError, RankFailedError, StoreTimeoutError

FAILURE = RankFailedError("rank 2 (host, pid 7) failed (killed)", ranks=[2], group="world")
WAITS = (Get("k", 60.0), Wait(("there", "k"), 60.0), MultiGet(("k", "there"), 60.0), QueuePop("k", 60.0))


@pytest.fixture
def store(table, url) -> Iterator[StoreClient]:
    Set("there", b"").apply(table)
    with contextlib.closing(StoreClient(url, "secret")) as client:
        yield client


@pytest.fixture
def begin(threads, table) -> Callable[..., Future]:
    """Begins a wait, and returns when the table has it."""

    def begun(store, command):
        waiting = threads.submit(store.execute, command)
        wait_until(lambda: table._watches.get("k") or table._pending_pops.get("k"), "the wait")
        wait_until(store.waits_under_way, "its record at the caller's side")
        return waiting

    return begun


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize("command", WAITS, ids=lambda command: command.name)
def test_a_wait_ends(store, begin, table, command):
    waiting = begin(store, command)
    assert store.waits_under_way()
    (pending,) = store.pending_waits()
    assert pending.command == command
    assert "k" in pending.awaited_keys()
    store.fail_waits(FAILURE, pending.began)
    with pytest.raises(RankFailedError, match=r"rank 2 \(host, pid 7\) failed .*'k'") as caught:
        waiting.result(20)
    assert caught.value.ranks == (2,)
    wait_until(lambda: not table._watches and not table._pending_pops, "the table to forget it")
    assert not store.waits_under_way()
    assert not store.pending_waits()
    # One that is begun afterwards is another wait.
    waiting = begin(store, command)
    store.execute(Set("k", b"v"))
    store.execute(QueuePush("k", b"v"))
    assert waiting.result(20) in (b"v", [b"v", b""], None)


def test_a_wait_that_begins_after_the_failure_goes_on(store, begin):
    failed_at = time.monotonic()
    waiting = begin(store, Get("k", 60.0))
    store.fail_waits(FAILURE, failed_at)
    store.execute(Set("k", b"v"))
    assert waiting.result(20) == b"v"


def test_other_calls_go_on(store, begin):
    waiting = begin(store, Get("k", 60.0))
    stop, counted = threading.Event(), []

    def count() -> None:
        while not stop.is_set():
            counted.append(store.execute(Add("n")))

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(100):
        store.fail_waits(FAILURE)
    wait_until(lambda: len(counted) > 100, "a hundred calls")
    stop.set()
    thread.join()
    assert counted == [*range(1, len(counted) + 1)]
    with pytest.raises(RankFailedError):
        waiting.result(20)


def test_no_value_of_a_queue_is_lost(store, begin):
    """Pops that end take nothing, or return what they have taken."""
    taken = []
    for number in range(30):
        waiting = begin(store, QueuePop("k", 60.0))
        pushing = threading.Thread(target=store.execute, args=[QueuePush("k", b"%d" % number)])
        pushing.start()
        store.fail_waits(FAILURE)
        pushing.join()
        try:
            taken.append(waiting.result(20))
        except RankFailedError:
            taken.append(store.execute(QueuePop("k", 20.0)))
    assert taken == [b"%d" % number for number in range(30)]


def test_for_good(store):
    store.fail_waits(StoreTimeoutError("no other rank is left", ranks=[1, 2]), for_good=True)
    with pytest.raises(StoreTimeoutError, match=r"no other rank is left: .*'k'") as caught:
        store.execute(Get("k", 60.0))
    assert caught.value.ranks == (1, 2)
    with pytest.raises(QueueEmptyError):
        store.execute(QueuePop("k"))
    store.execute(Set("k", b"v"))
    assert store.execute(Get("k", 60.0)) == b"v"
