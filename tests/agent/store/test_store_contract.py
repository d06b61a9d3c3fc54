"""What every store does, for each kind of store: the agent's own, and another agent's over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rankmesh_agent.store.base import Store
from rankmesh_agent.store.client import RemoteStore
from rankmesh_agent.store.memory import MemoryStore
from rankmesh_agent.wire.errors import (
    DistStoreError,
    InvalidKeyError,
    KeyNotFoundError,
    NotANumberError,
    StoreTimeoutError,
)

pytestmark = pytest.mark.anyio

STRANGE_KEYS = ["a/b", "/a", "a//b/", ".", "..", "../up", "add", "a?b#c", "100%", "%2F", "a b+c", "grüße/世界"]
STRANGE_KEYS += ["\x00\n", "a\nb"]


@pytest.fixture(params=["memory", "remote"])
async def store(request, owned) -> AsyncIterator[Store]:
    found = owned if request.param == "memory" else RemoteStore(request.getfixturevalue("owner"), "secret")
    yield found
    await found.close()


async def until_watched(owned: MemoryStore, *keys: str) -> None:
    async with asyncio.timeout(10.0):
        while set(owned.table._watches) != set(keys):
            await asyncio.sleep(0.002)


async def test_values(store):
    for value in (b"", b"\x00\xff" * 1000, b"{}", bytes(1 << 20)):
        await store.set("k", value)
        assert await store.get("k") == value


@pytest.mark.parametrize("key", STRANGE_KEYS)
async def test_strange_keys(store, owned, key):
    await store.set(key, b"v")
    assert owned.table.keys() == [key]
    assert await store.get(key) == b"v"
    assert await store.keys(key) == [key]
    await store.wait([key], 0)
    assert await store.delete(key)
    assert await store.add(key, 2) == 2


async def test_delete(store):
    await store.set("k", b"v")
    assert await store.delete("k") is True
    assert await store.delete("k") is False


async def test_keys(store):
    for key in ("b/2", "a", "b/1"):
        await store.set(key, b"")
    assert await store.keys() == ["a", "b/1", "b/2"]
    assert await store.keys("b/") == ["b/1", "b/2"]
    assert await store.keys("none") == []


async def test_add(store):
    await store.set("n", b"40")
    assert await store.add("n", 2) == 42
    assert await store.get("n") == b"42"
    await store.set("n", b"many")
    with pytest.raises(NotANumberError, match="'n'"):
        await store.add("n", 1)


async def test_a_key_that_is_not_there(store, owned):
    with pytest.raises(KeyNotFoundError, match="'k'") as caught:
        await store.get("k")
    assert isinstance(caught.value, DistStoreError)
    with pytest.raises(KeyNotFoundError):
        await store.get("k", wait_seconds=0.01)
    assert owned.table._watches == {}


async def test_get_waits(store, owned):
    waiting = asyncio.create_task(store.get("k", wait_seconds=30.0))
    await until_watched(owned, "k")
    owned.table.set("k", b"v")
    assert await waiting == b"v"


async def test_wait(store, owned):
    await store.set("a", b"")
    waiting = asyncio.create_task(store.wait(["a", "b"], 30.0))
    await until_watched(owned, "a", "b")
    assert not waiting.done()
    owned.table.set("b", b"")
    await waiting
    await store.wait([], 0.0)


async def test_a_wait_that_ran_out_names_the_missing_keys(store, owned):
    await store.set("there", b"")
    with pytest.raises(StoreTimeoutError, match=r"2 of 3 keys .*: 'not', 'yet'$") as caught:
        await store.wait(["not", "there", "yet"], 0.01)
    assert isinstance(caught.value, TimeoutError)
    assert owned.table._watches == {}


async def test_many_missing_keys_are_not_all_named(store):
    with pytest.raises(StoreTimeoutError, match=r"'9' and 90 more$"):
        await store.wait([str(number) for number in range(100)], 0.0)


async def test_who_stops_waiting_leaves_nothing_behind(store, owned):
    for waiting in (store.get("k", wait_seconds=30.0), store.wait(["k"], 30.0)):
        task = asyncio.create_task(waiting)
        await until_watched(owned, "k")
        task.cancel()
        await until_watched(owned)
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("key", ["", "k" * 1025, "\ud800"])
async def test_what_is_no_key(store, key):
    for call in (store.get(key), store.set(key, b""), store.delete(key), store.add(key, 1), store.wait([key], 0)):
        with pytest.raises(InvalidKeyError):
            await call


async def test_several_event_loops_share_one_table(owned):
    def elsewhere() -> bytes:
        return asyncio.run(owned.get("k", wait_seconds=30.0))

    waiting = [asyncio.create_task(asyncio.to_thread(elsewhere)) for _ in range(4)]
    await until_watched(owned, "k")
    await owned.set("k", b"v")
    assert await asyncio.gather(*waiting) == [b"v"] * 4


async def test_32_clients_add_at_once(store):
    await asyncio.gather(*(store.add("n", 1) for _ in range(32)))
    assert await store.get("n") == b"32"
