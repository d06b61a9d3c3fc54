"""Every way to one table of keys beside the model, through calls and waits chosen at random."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.store_machine import Subject, drive

from rankmesh._stores.commands import CommandStore
from rankmesh_agent.store.async_store import AsyncStore
from rankmesh_agent.store.base import BlockingStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.job_store import JobStoreClient
from rankmesh_agent.store.memory import BlockingMemoryStore
from rankmesh_agent.wire.store_frames import NO_STORE_ID

pytestmark = pytest.mark.slow


class OnLoops(BlockingStore):
    """A store for callers with an event loop: each call has a loop of its own."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    def execute(self, command: Command, timeout: float | None = None) -> Any:
        return asyncio.run(self._store.execute(command))

    def close(self) -> None:
        self._store.close()


def over_tcp(url: str) -> StoreClient:
    found = StoreClient(url, "secret")
    found._connect_unix = lambda: None  # type: ignore[method-assign]
    return found


KINDS: dict[str, Callable[..., BlockingStore]] = {
    "in this process": lambda table, url: BlockingMemoryStore(table),
    "client over a unix socket": lambda table, url: StoreClient(url, "secret"),
    "client over tcp": lambda table, url: over_tcp(url),
    "a job's": lambda table, url: JobStoreClient(url, "secret", NO_STORE_ID, lambda command, error: error),
    "with an event loop": lambda table, url: OnLoops(AsyncStore(lambda: StoreClient(url, "secret"))),
}


@pytest.fixture
def opened(table, url) -> Iterator[Callable[[str], CommandStore]]:
    stores = []

    def make(kind: str) -> CommandStore:
        stores.append(CommandStore(KINDS[kind](table, url), timedelta(seconds=30)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_store(opened, table, kind):
    stores = [opened(kind), opened("in this process")]
    drive(lambda: Subject(stores, [table]), examples=10 if "loop" in kind else 30)


def test_all_ways_to_the_same_keys(opened, table):
    stores = [opened(kind) for kind in KINDS]
    drive(lambda: Subject(stores, [table]), examples=15)
