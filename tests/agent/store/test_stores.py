"""Every way to one table of keys beside the model, through calls and waits chosen at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from support.store_machine import Subject, drive

from rankmesh._stores.commands import CommandStore
from rankmesh_agent.store.base import BlockingStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.http_client import BlockingHttpStore, HttpStore
from rankmesh_agent.store.memory import BlockingMemoryStore

pytestmark = pytest.mark.slow


def over_tcp(url: str) -> StoreClient:
    found = StoreClient(url, "secret")
    found._connect_unix = lambda: None  # type: ignore[method-assign]
    return found


KINDS: dict[str, Callable[..., BlockingStore]] = {
    "memory": lambda owned, url, on_loop: on_loop(owned),
    "blocking memory": lambda owned, url, on_loop: BlockingMemoryStore(owned.table),
    "client over a unix socket": lambda owned, url, on_loop: StoreClient(url, "secret"),
    "client over tcp": lambda owned, url, on_loop: over_tcp(url),
    "http": lambda owned, url, on_loop: on_loop(HttpStore(url, "secret")),
    "blocking http": lambda owned, url, on_loop: BlockingHttpStore(url, "secret"),
}


@pytest.fixture
def opened(owned, owner, on_loop) -> Iterator[Callable[[str], CommandStore]]:
    stores = []

    def make(kind: str) -> CommandStore:
        stores.append(CommandStore(KINDS[kind](owned, owner, on_loop), timedelta(seconds=30)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_store(opened, owned, kind):
    stores = [opened(kind), opened("blocking memory")]
    drive(lambda: Subject(stores, [owned.table]), examples=10 if "http" in kind else 30)


def test_all_ways_to_the_same_keys(opened, owned):
    stores = [opened(kind) for kind in KINDS]
    drive(lambda: Subject(stores, [owned.table]), examples=15)
