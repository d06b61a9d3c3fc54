"""What every store does with every command, whether it has the keys or asks who has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.store.blocking import BlockingMemoryStore, BlockingStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import (
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    MultiGet,
    MultiSet,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    Wait,
)
from rankmesh_agent.store.condition import Condition, etag
from rankmesh_agent.store.http_client import BlockingHttpStore, HttpStore
from rankmesh_agent.store.keys import MAX_VALUE_BYTES
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.wire.errors import (
    DistStoreError,
    IdempotencyKeyReusedError,
    InvalidKeyError,
    InvalidValueError,
    KeyNotFoundError,
    NotANumberError,
    PreconditionFailedError,
    QueueEmptyError,
    StoreTimeoutError,
)

pytestmark = pytest.mark.anyio

STRANGE_KEYS = ["a/b", "/a", "a//b/", ".", "..", "../up", "add", "a?b#c", "100%", "%2F", "a b+c", "grüße/世界"]
STRANGE_KEYS += ["\x00\n", "a\nb"]


class InThreads(AsyncStore):
    """A store for callers without an event loop, called from threads."""

    def __init__(self, blocking: BlockingStore) -> None:
        self.blocking = blocking
        self.threads = ThreadPoolExecutor(64)

    async def execute(self, command: Any, once: str = "") -> Any:
        assert not once
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.blocking.execute, command)

    def cancel_waits(self) -> None:
        """Nobody waits here."""

    async def close(self) -> None:
        self.threads.shutdown()
        self.blocking.close()


KINDS: dict[str, Callable[[MemoryStore, str], AsyncStore]] = {
    "memory": lambda owned, url: owned,
    "remote": lambda owned, url: HttpStore(url, "secret"),
    "blocking memory": lambda owned, url: InThreads(BlockingMemoryStore(owned.table)),
    "blocking remote": lambda owned, url: InThreads(StoreClient(url, "secret")),
    "blocking remote http": lambda owned, url: InThreads(BlockingHttpStore(url, "secret")),
}


@pytest.fixture(params=KINDS)
async def store(request, owned) -> AsyncIterator[AsyncStore]:
    found = KINDS[request.param](owned, request.getfixturevalue("owner") if "remote" in request.param else "")
    yield found
    await found.close()


@pytest.fixture(params=["memory", "remote"])
async def loop_store(request, owned) -> AsyncIterator[AsyncStore]:
    """A store for callers with an event loop."""
    found = KINDS[request.param](owned, request.getfixturevalue("owner") if "remote" in request.param else "")
    yield found
    await found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.002)


async def until_watched(owned: MemoryStore, *keys: str) -> None:
    await until(lambda: set(owned.table._watches) == set(keys))


class TestValues:
    async def test_any_bytes(self, store):
        for value in (b"", b"\x00\xff" * 1000, b"{}", bytes(1 << 20)):
            await store.execute(Set("k", value))
            assert await store.execute(Get("k")) == value

    @pytest.mark.parametrize("key", STRANGE_KEYS)
    async def test_strange_keys(self, store, owned, key):
        await store.execute(Set(key, b"v"))
        assert owned.table.keys() == [key]
        assert await store.execute(Get(key)) == b"v"
        assert await store.execute(MultiGet((key,))) == [b"v"]
        assert await store.execute(Keys(key)) == [key]
        await store.execute(Wait((key,)))
        assert await store.execute(Check((key,)))
        assert await store.execute(Delete(key))
        assert await store.execute(Add(key, 2)) == 2
        await store.execute(Append(key, b"0"))
        await store.execute(QueuePush(key, b"q"))
        assert await store.execute(QueueLen(key)) == 1
        assert await store.execute(QueuePop(key)) == b"q"
        assert await store.execute(Get(key)) == b"20"

    async def test_delete(self, store):
        await store.execute(Set("k", b"v"))
        assert await store.execute(Delete("k")) is True
        assert await store.execute(Delete("k")) is False

    async def test_keys(self, store):
        for key in ("b/2", "a", "b/1"):
            await store.execute(Set(key, b""))
        assert await store.execute(Keys()) == ["a", "b/1", "b/2"]
        assert await store.execute(Keys("b/")) == ["b/1", "b/2"]
        assert await store.execute(Keys("none")) == []
        assert await store.execute(Count()) == 3
        assert await store.execute(Count("b/")) == 2

    async def test_append(self, store):
        await store.execute(Append("k", b"\xff"))
        await store.execute(Append("k", b""))
        await store.execute(Append("k", b"\x00"))
        assert await store.execute(Get("k")) == b"\xff\x00"

    async def test_a_value_does_not_grow_without_end(self, store, owned):
        Set("k", bytes(MAX_VALUE_BYTES)).apply(owned.table)
        with pytest.raises(InvalidValueError, match=str(MAX_VALUE_BYTES)):
            await store.execute(Append("k", b"1"))

    async def test_compare_set(self, store):
        assert await store.execute(CompareSet("k", b"x", b"1")) == b"x"
        assert not await store.execute(Check(("k",)))
        assert await store.execute(CompareSet("k", b"", b"\xff1")) == b"\xff1"
        assert await store.execute(CompareSet("k", b"", b"2")) == b"\xff1"
        assert await store.execute(CompareSet("k", b"x", b"2")) == b"\xff1"
        assert await store.execute(CompareSet("k", b"\xff1", b"")) == b""
        assert await store.execute(CompareSet("k", b"", b"3")) == b"3"
        assert await store.execute(Get("k")) == b"3"

    async def test_several_at_once(self, store):
        await store.execute(MultiSet((("a", b"\xff"), ("b", b""), ("a", b"\x00"))))
        assert await store.execute(MultiGet(("b", "a", "b"))) == [b"", b"\x00", b""]
        await store.execute(MultiSet(()))
        assert await store.execute(MultiGet(())) == []
        assert await store.execute(Check(()))
        assert await store.execute(Check(("a", "b", "a")))
        assert not await store.execute(Check(("a", "none")))


class TestAdd:
    async def test_a_missing_key_counts_as_0_and_digits_are_stored(self, store):
        assert await store.execute(Add("n", 3)) == 3
        assert await store.execute(Add("n", -5)) == -2
        assert await store.execute(Get("n")) == b"-2"

    @pytest.mark.parametrize("value", [b"41", b"+41", b"0041"])
    async def test_digits_that_were_set(self, store, value):
        await store.execute(Set("n", value))
        assert await store.execute(Add("n", 1)) == 42

    @pytest.mark.parametrize("value", [b"", b"x", b"1.5", b" 1", b"1_0", "\u0661".encode(), b"9" * 20])
    async def test_not_a_number(self, store, value):
        await store.execute(Set("n", value))
        with pytest.raises(NotANumberError, match="'n'") as caught:
            await store.execute(Add("n", 1))
        assert isinstance(caught.value, ValueError)
        assert await store.execute(Get("n")) == value

    @pytest.mark.parametrize(("edge", "step"), [((1 << 63) - 1, 1), (-(1 << 63), -1)])
    async def test_sums_stay_within_64_bits(self, store, edge, step):
        assert await store.execute(Add("n", edge)) == edge
        with pytest.raises(NotANumberError, match="64 bits"):
            await store.execute(Add("n", step))
        assert await store.execute(Add("n", 0)) == edge

    async def test_32_clients_add_at_once(self, store):
        await asyncio.gather(*(store.execute(Add("n", 1)) for _ in range(32)))
        assert await store.execute(Get("n")) == b"32"


class TestConditions:
    async def test_only_if_the_key_has_no_value(self, store):
        absent = Condition(if_absent=True)
        await store.execute(Set("k", b"1", absent))
        with pytest.raises(PreconditionFailedError, match="has a value already"):
            await store.execute(Set("k", b"2", absent))
        assert await store.execute(Get("k")) == b"1"

    async def test_only_if_the_value_is_one_of_these(self, store):
        await store.execute(Set("k", b"1"))
        same = Condition((etag(b"0"), etag(b"1")))
        await store.execute(Set("k", b"2", same))
        for command in (Set("k", b"3", same), Delete("k", same), Delete("k", Condition(()))):
            with pytest.raises(PreconditionFailedError, match="has another value") as caught:
                await store.execute(command)
            assert etag(b"2") in str(caught.value)
        assert await store.execute(Delete("k", Condition((etag(b"2"),)))) is True

    async def test_only_if_there_is_any(self, store):
        there = Condition(("*",))
        for command in (Set("k", b"1", there), Delete("k", there)):
            with pytest.raises(PreconditionFailedError, match="has no value"):
                await store.execute(command)
        await store.execute(Set("k", b"1"))
        await store.execute(Set("k", b"2", there))
        assert await store.execute(Delete("k", there)) is True


class TestWaiting:
    async def test_a_key_that_is_not_there(self, store, owned):
        for command in (Get("k"), Get("k", 0.01)):
            with pytest.raises(KeyNotFoundError, match="'k'") as caught:
                await store.execute(command)
            assert isinstance(caught.value, DistStoreError)
        assert owned.table._watches == {}

    async def test_get_waits(self, store, owned):
        waiting = asyncio.create_task(store.execute(Get("k", 30.0)))
        await until_watched(owned, "k")
        Set("k", b"v").apply(owned.table)
        assert await waiting == b"v"

    @pytest.mark.parametrize(("command", "result"), [(Wait, None), (MultiGet, [b"", b"v"])])
    async def test_wait_for_several(self, store, owned, command, result):
        await store.execute(Set("a", b""))
        waiting = asyncio.create_task(store.execute(command(("a", "b"), 30.0)))
        await until_watched(owned, "a", "b")
        assert not waiting.done()
        Set("b", b"v").apply(owned.table)
        assert await waiting == result
        await store.execute(Wait(()))

    @pytest.mark.parametrize("command", [Wait, MultiGet])
    async def test_a_wait_that_ran_out_names_the_missing_keys(self, store, owned, command):
        await store.execute(Set("there", b""))
        with pytest.raises(StoreTimeoutError, match=r"2 of 3 keys .*: 'not', 'yet'$") as caught:
            await store.execute(command(("not", "there", "yet"), 0.01))
        assert isinstance(caught.value, TimeoutError)
        assert owned.table._watches == {}

    async def test_many_missing_keys_are_not_all_named(self, store):
        with pytest.raises(StoreTimeoutError, match=r"'9' and 90 more$"):
            await store.execute(Wait(tuple(str(number) for number in range(100))))

    async def test_who_stops_waiting_leaves_nothing_behind(self, loop_store, owned):
        for command in (Get("k", 30.0), Wait(("k",), 30.0), MultiGet(("k",), 30.0)):
            task = asyncio.create_task(loop_store.execute(command))
            await until_watched(owned, "k")
            task.cancel()
            await until_watched(owned)
            with pytest.raises(asyncio.CancelledError):
                await task

    async def test_several_event_loops_share_one_table(self, owned):
        def elsewhere() -> bytes:
            return asyncio.run(owned.execute(Get("k", 30.0)))

        waiting = [asyncio.create_task(asyncio.to_thread(elsewhere)) for _ in range(4)]
        await until_watched(owned, "k")
        await owned.execute(Set("k", b"v"))
        assert await asyncio.gather(*waiting) == [b"v"] * 4

    @pytest.mark.parametrize("kind", ["memory", "blocking memory"])
    async def test_who_waits_at_a_table_that_is_closed_is_sent_away(self, kind, owned):
        store = KINDS[kind](owned, "")
        waiting = [asyncio.create_task(store.execute(command)) for command in (Get("k", 30.0), QueuePop("q", 30.0))]
        await until(lambda: bool(owned.table._watches and owned.table._pending_pops))
        owned.table.close()
        async with asyncio.timeout(30.0):
            for task, error in zip(waiting, (KeyNotFoundError, QueueEmptyError), strict=True):
                with pytest.raises(error):
                    await task
        await store.close()


class TestQueues:
    async def test_first_in_first_out(self, store):
        assert await store.execute(QueueLen("q")) == 0
        for value in (b"1", b"", b"\xff"):
            await store.execute(QueuePush("q", value))
        assert await store.execute(QueueLen("q")) == 3
        assert [await store.execute(QueuePop("q")) for _ in range(3)] == [b"1", b"", b"\xff"]

    async def test_an_empty_one(self, store, owned):
        for command in (QueuePop("q"), QueuePop("q", 0.01)):
            with pytest.raises(QueueEmptyError, match="'q'"):
                await store.execute(command)
        assert owned.table._pending_pops == {}

    async def test_pop_waits(self, store, owned):
        waiting = asyncio.create_task(store.execute(QueuePop("q", 30.0)))
        await until(lambda: "q" in owned.table._pending_pops)
        QueuePush("q", b"v").apply(owned.table)
        assert await waiting == b"v"
        assert owned.table.length("q") == 0

    async def test_who_stops_waiting_takes_nothing(self, loop_store, owned):
        task = asyncio.create_task(loop_store.execute(QueuePop("q", 30.0)))
        await until(lambda: "q" in owned.table._pending_pops)
        task.cancel()
        await until(lambda: owned.table._pending_pops == {})
        QueuePush("q", b"v").apply(owned.table)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await loop_store.execute(QueuePop("q")) == b"v"

    async def test_what_was_given_to_somebody_who_has_gone_is_put_back(self, owned):
        task = asyncio.create_task(owned.execute(QueuePop("q", 30.0)))
        await until(lambda: "q" in owned.table._pending_pops)
        QueuePush("q", b"1").apply(owned.table)  # it is his now, but he goes before he knows
        QueuePush("q", b"2").apply(owned.table)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [await owned.execute(QueuePop("q")) for _ in range(2)] == [b"1", b"2"]

    async def test_many_take_each_value_once(self, store):
        taking = [asyncio.create_task(store.execute(QueuePop("q", 30.0))) for _ in range(20)]
        await asyncio.gather(*(store.execute(QueuePush("q", b"%d" % number)) for number in range(20)))
        assert sorted(await asyncio.gather(*taking)) == sorted(b"%d" % number for number in range(20))


class TestCallsThatComeTwice:
    @pytest.mark.parametrize(
        ("command", "results", "end"),
        [
            (Set("k", b"new"), None, b"new"),
            (Append("k", b"1"), None, b"11"),
            (Add("k", 4), 5, b"5"),
            (CompareSet("k", b"1", b"2"), b"2", b"2"),
            (Delete("k"), True, None),
            (MultiSet((("k", b"2"),)), None, b"2"),
        ],
        ids=lambda value: type(value).__name__ if hasattr(value, "writes") else "",
    )
    async def test_they_are_carried_out_once(self, loop_store, owned, command, results, end):
        Set("k", b"1").apply(owned.table)
        assert [await loop_store.execute(command, "name") for _ in range(3)] == [results] * 3
        if end is None:
            assert owned.table.keys() == []
        else:
            assert await loop_store.execute(Get("k")) == end

    async def test_queues(self, loop_store, owned):
        for _ in range(2):
            await loop_store.execute(QueuePush("q", b"1"), "first push")
        await loop_store.execute(QueuePush("q", b"2"), "second push")
        assert await loop_store.execute(QueueLen("q")) == 2
        assert [await loop_store.execute(QueuePop("q"), "pop") for _ in range(2)] == [b"1", b"1"]
        assert await loop_store.execute(QueuePop("q"), "another") == b"2"

    async def test_an_error_is_not_an_answer_that_is_kept(self, loop_store, owned):
        Set("k", b"x").apply(owned.table)
        with pytest.raises(NotANumberError):
            await loop_store.execute(Add("k"), "name")
        Set("k", b"1").apply(owned.table)
        assert await loop_store.execute(Add("k"), "name") == 2

    async def test_a_name_is_one_calls(self, loop_store):
        await loop_store.execute(Add("k", 1), "name")
        with pytest.raises(IdempotencyKeyReusedError, match="'name'"):
            await loop_store.execute(Add("k", 2), "name")
        assert await loop_store.execute(Get("k")) == b"1"

    async def test_who_asks_again_takes_the_place_of_his_first_request(self, owned):
        first = asyncio.create_task(owned.execute(QueuePop("q", 30.0), "name"))
        await until(lambda: "q" in owned.table._pending_pops)
        second = asyncio.create_task(owned.execute(QueuePop("q", 30.0), "name"))
        with pytest.raises(QueueEmptyError):
            await first
        await owned.execute(QueuePush("q", b"1"))
        assert await second == b"1"

    async def test_who_asks_again_gets_what_his_first_request_was_given(self, owned):
        first = asyncio.create_task(owned.execute(QueuePop("q", 30.0), "name"))
        await until(lambda: "q" in owned.table._pending_pops)
        QueuePush("q", b"1").apply(owned.table)
        QueuePush("q", b"2").apply(owned.table)
        first.cancel()
        assert await owned.execute(QueuePop("q", 30.0), "name") == b"1"
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert owned.table.length("q") == 1


@pytest.mark.parametrize("key", ["", "k" * 1025, "\ud800"])
def test_what_is_no_key(key):
    for make in (Get, Delete, Add, QueueLen, QueuePop, lambda key: Set(key, b""), lambda key: Append(key, b"")):
        with pytest.raises(InvalidKeyError):
            make(key)
    for make in (Wait, MultiGet, Check, lambda keys: MultiSet(tuple((key, b"") for key in keys))):
        with pytest.raises(InvalidKeyError):
            make(("good", key))


def test_what_is_no_value():
    much = bytes(MAX_VALUE_BYTES + 1)
    for make in (Set, Append, QueuePush, lambda key, value: MultiSet(((key, value),))):
        with pytest.raises(InvalidValueError):
            make("k", much)
    with pytest.raises(InvalidValueError):
        CompareSet("k", much[1:], b"1")
