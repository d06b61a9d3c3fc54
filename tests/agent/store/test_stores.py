"""Every way to one table of keys beside the model, through calls and waits chosen at random."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.store_machine import Subject, drive

from rankmesh._stores.commands import CommandStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.store.store import LocalStore, Store
from rankmesh_agent.wire.store_frames import NO_STORE_ID

pytestmark = pytest.mark.slow


class OnLoops(StoreClient):
    """A store whose calls are awaited: each call has a loop of its own."""

    def execute(self, command: Command, timeout: float | None = None, call: Any = None) -> Any:
        async def execute() -> Any:
            return await self.submit(command)

        return asyncio.run(execute()) if call is None else super().execute(command, timeout, call)


def over_tcp(url: str) -> StoreClient:
    found = StoreClient(url, "secret")
    found._connector._connect_unix = lambda: None  # type: ignore[method-assign]
    return found


KINDS: dict[str, Callable[..., Store]] = {
    "in this process": lambda table, url: LocalStore(table),
    "client over a unix socket": lambda table, url: StoreClient(url, "secret"),
    "client over tcp": lambda table, url: over_tcp(url),
    "a job's": lambda table, url: JobStore(url, "secret", NO_STORE_ID.hex()),
    "with an event loop": lambda table, url: OnLoops(url, "secret"),
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
