"""Stores for callers with an event loop: callers that leave, several loops, and requests that come twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from rankmesh_agent.store import idempotency
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.store.commands import Add, Get, MultiGet, QueueLen, QueuePop, QueuePush, Set, Wait
from rankmesh_agent.store.http_client import HttpStore
from rankmesh_agent.store.idempotency import MAX_REPLIES
from rankmesh_agent.store.memory import BlockingMemoryStore
from rankmesh_agent.wire.errors import IdempotencyKeyReusedError, KeyNotFoundError, NotANumberError, QueueEmptyError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "http"])
async def store(request, owned) -> AsyncIterator[AsyncStore]:
    found = owned if request.param == "memory" else HttpStore(request.getfixturevalue("owner"), "secret")
    yield found
    await found.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


async def pending_pop(owned, execute, *arguments) -> asyncio.Task:
    """Start a pop, and wait until the table has it."""
    task = asyncio.create_task(execute(QueuePop("q", 30.0), *arguments))
    await until(lambda: "q" in owned.table._pending_pops)
    return task


class TestWaits:
    @pytest.mark.parametrize("command", [Get("k", 30.0), Wait(("k",), 30.0), MultiGet(("k",), 30.0)])
    async def test_a_cancelled_wait_is_removed(self, store, owned, command):
        task = asyncio.create_task(store.execute(command))
        await until(lambda: owned.table._watches)
        task.cancel()
        await until(lambda: not owned.table._watches)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_cancelled_pop_takes_nothing(self, store, owned):
        task = await pending_pop(owned, store.execute)
        task.cancel()
        await until(lambda: owned.table._pending_pops == {})
        QueuePush("q", b"v").apply(owned.table)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await store.execute(QueuePop("q")) == b"v"

    async def test_a_value_for_a_caller_that_has_left_is_put_back(self, owned):
        task = await pending_pop(owned, owned.execute)
        QueuePush("q", b"1").apply(owned.table)  # the pop has it, and is cancelled before its task runs
        QueuePush("q", b"2").apply(owned.table)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [await owned.execute(QueuePop("q")) for _ in range(2)] == [b"1", b"2"]

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_closing_the_table_ends_all_waits(self, owned, blocking):
        def start(command):
            if blocking:
                return asyncio.create_task(asyncio.to_thread(BlockingMemoryStore(owned.table).execute, command))
            return asyncio.create_task(owned.execute(command))

        waiting = [start(command) for command in (Get("k", 30.0), QueuePop("q", 30.0))]
        await until(lambda: owned.table._watches and owned.table._pending_pops)
        owned.table.close()
        async with asyncio.timeout(30.0):
            for task, error in zip(waiting, (KeyNotFoundError, QueueEmptyError), strict=True):
                with pytest.raises(error):
                    await task


class TestIdempotencyKeys:
    async def test_a_repeated_request_is_executed_once(self, store, owned, call):
        command, result, end = call
        Set("k", b"1").apply(owned.table)
        assert [await store.execute(command, "name") for _ in range(3)] == [result] * 3
        assert owned.table.value("k") == end

    async def test_queues(self, store, owned):
        for _ in range(2):
            await store.execute(QueuePush("q", b"1"), "first push")
        await store.execute(QueuePush("q", b"2"), "second push")
        assert await store.execute(QueueLen("q")) == 2
        assert [await store.execute(QueuePop("q"), "pop") for _ in range(2)] == [b"1", b"1"]
        assert await store.execute(QueuePop("q"), "another") == b"2"

    async def test_replies_do_not_fill_the_memory(self, owned, monkeypatch):
        size = 4 * MAX_REPLIES
        monkeypatch.setattr(idempotency, "MAX_REPLY_BYTES", 10 * MAX_REPLIES)
        for number in range(10):
            await owned.execute(QueuePush("q", bytes(size)))
            await owned.execute(QueuePop("q"), f"pop {number}")
            late = await pending_pop(owned, owned.execute, f"late pop {number}")
            await owned.execute(QueuePush("q", bytes(size)))
            await late
        assert owned._replies._bytes <= 10 * MAX_REPLIES + size
        await owned.execute(QueuePush("q", b"another"))
        assert await owned.execute(QueuePop("q"), "late pop 9") == bytes(size)

    async def test_an_error_is_not_cached(self, store, owned):
        Set("k", b"x").apply(owned.table)
        with pytest.raises(NotANumberError):
            await store.execute(Add("k"), "name")
        Set("k", b"1").apply(owned.table)
        assert await store.execute(Add("k"), "name") == 2

    async def test_a_key_belongs_to_one_command(self, store):
        await store.execute(Add("k", 1), "name")
        with pytest.raises(IdempotencyKeyReusedError, match="'name'"):
            await store.execute(Add("k", 2), "name")
        assert await store.execute(Get("k")) == b"1"

    async def test_a_repeated_request_replaces_the_one_that_waits(self, owned):
        first = await pending_pop(owned, owned.execute, "name")
        second = asyncio.create_task(owned.execute(QueuePop("q", 30.0), "name"))
        with pytest.raises(QueueEmptyError):
            await first
        await owned.execute(QueuePush("q", b"1"))
        assert await second == b"1"

    async def test_a_repeated_request_takes_over_the_result(self, owned):
        first = await pending_pop(owned, owned.execute, "name")
        QueuePush("q", b"1").apply(owned.table)
        QueuePush("q", b"2").apply(owned.table)
        first.cancel()
        assert await owned.execute(QueuePop("q", 30.0), "name") == b"1"
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert owned.table.length("q") == 1
