"""Calls that are awaited: callers that leave, several event loops, and requests that come twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.processes import wait_until

from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import Add, Get, MultiGet, QueueLen, QueuePop, QueuePush, Set, Wait
from rankmesh_agent.wire.errors import NotANumberError, QueueEmptyError

pytestmark = pytest.mark.anyio

POP = QueuePop("q", 30.0)


@pytest.fixture
def store(url) -> Iterator[StoreClient]:
    found = StoreClient(url, "secret")
    yield found
    found.close()


async def until(condition: Callable[[], object]) -> None:
    await asyncio.sleep(0)  # tasks begin
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


async def begun(store, table, command: Command, *name: str) -> asyncio.Future[Any]:
    """Start a wait, and return it once the table has it."""
    task = asyncio.ensure_future(store.submit(command, *name))
    await until(lambda: table._watches or table._pending_pops)
    return task


def no_thread_calls() -> bool:
    return all(thread.name != "rankmesh-store-call" for thread in threading.enumerate())


class TestCallersThatLeave:
    @pytest.mark.parametrize("command", [Get("k", 30.0), Wait(("k",), 30.0), MultiGet(("k",), 30.0), POP])
    async def test_their_wait_is_removed_and_takes_nothing(self, store, table, command):
        task = await begun(store, table, command)
        task.cancel()
        await until(lambda: not table._watches and not table._pending_pops)
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.submit(QueuePush("q", b"v"))
        assert await store.submit(QueuePop("q")) == b"v"

    async def test_a_call_that_has_not_begun_has_no_effect(self, url, table):
        """It is cancelled while its thread connects."""
        connecting, go_on = threading.Event(), threading.Event()

        def wait_and_open(ends: float) -> Any:
            connecting.set()
            assert go_on.wait(30)
            return connect(ends)

        table.push("q", b"v")
        store = StoreClient(url, "secret")
        connect, store._connector.open = store._connector.open, wait_and_open
        task = asyncio.ensure_future(store.submit(POP))
        await until(connecting.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await store.submit(QueuePop("q")) == b"v"
        store.close()

    @pytest.mark.parametrize("settled", [True, False], ids=["the task can go on", "the loop does not know yet"])
    async def test_a_value_that_has_come_is_put_back(self, store, table, settled):
        task = await begun(store, table, POP)
        table.push("q", b"1")
        wait_until(no_thread_calls, "its thread to end")  # while the loop stands still
        if settled:
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: table.length("q"))
        assert await store.submit(QueuePop("q")) == b"1"

    async def test_a_value_that_has_come_under_a_key_is_for_who_repeats_the_request(self, store, table):
        task = await begun(store, table, POP, "name")
        table.push("q", b"1")
        table.push("q", b"2")
        wait_until(no_thread_calls, "its thread to end")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await store.submit(POP, "name") == b"1"
        assert table.length("q") == 1


class TestIdempotencyKeys:
    async def test_a_repeated_request_is_executed_once(self, store, table, call):
        command, result, end = call
        Set("k", b"1").apply(table)
        assert [await store.submit(command, "name") for _ in range(3)] == [result] * 3
        assert table.value("k") == end

    async def test_queues(self, store):
        for _ in range(2):
            await store.submit(QueuePush("q", b"1"), "first push")
        await store.submit(QueuePush("q", b"2"), "second push")
        assert await store.submit(QueueLen("q")) == 2
        assert [await store.submit(QueuePop("q", seconds), "pop") for seconds in (0.0, 30.0)] == [b"1", b"1"]
        assert await store.submit(QueuePop("q"), "another") == b"2"

    async def test_an_error_is_not_kept(self, store, table):
        Set("k", b"x").apply(table)
        with pytest.raises(NotANumberError):
            await store.submit(Add("k"), "name")
        Set("k", b"1").apply(table)
        assert await store.submit(Add("k"), "name") == 2

    async def test_a_repeated_request_replaces_the_one_that_waits(self, store, table):
        first = await begun(store, table, POP, "name")
        second = asyncio.ensure_future(store.submit(POP, "name"))
        with pytest.raises(QueueEmptyError):
            await first
        await store.submit(QueuePush("q", b"1"))
        assert await second == b"1"
