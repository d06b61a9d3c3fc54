"""Every way to one table of keys beside the model, through calls and waits chosen at random."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.store_machine import Subject, drive

from rankmesh._stores.commands import CommandStore
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.store.blocking import BlockingMemoryStore, BlockingStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.http_client import BlockingHttpStore, HttpStore
from rankmesh_agent.store.memory import MemoryStore


class OnLoop(BlockingStore):
    """A store for callers with an event loop, which runs in a thread."""

    def __init__(self, store: AsyncStore) -> None:
        self._store, self._loop = store, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def execute(self, command: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._store.execute(command), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def over_tcp(url: str) -> StoreClient:
    found = StoreClient(url, "secret")
    found._connect_unix = lambda: None  # type: ignore[method-assign]
    return found


KINDS: dict[str, Callable[[MemoryStore, str], BlockingStore]] = {
    "memory": lambda owned, _: OnLoop(owned),
    "blocking memory": lambda owned, _: BlockingMemoryStore(owned.table),
    "client over a unix socket": lambda _, url: StoreClient(url, "secret"),
    "client over tcp": lambda _, url: over_tcp(url),
    "http": lambda _, url: OnLoop(HttpStore(url, "secret")),
    "blocking http": lambda _, url: BlockingHttpStore(url, "secret"),
}


@pytest.fixture
def opened(owned, owner) -> Iterator[Callable[[str], CommandStore]]:
    stores = []

    def make(kind: str) -> CommandStore:
        stores.append(CommandStore(KINDS[kind](owned, owner), timedelta(seconds=30)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_store(opened, owned, kind):
    stores = [opened(kind), opened("blocking memory")]
    drive(lambda: Subject(stores, [owned.table]), examples=15 if "http" in kind else 40)


def test_all_ways_to_the_same_keys(opened, owned):
    stores = [opened(kind) for kind in KINDS]
    drive(lambda: Subject(stores, [owned.table]), examples=20)
