"""Every store of the SDK beside the model, through calls and waits chosen at random."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.store_machine import Subject, drive

import rankmesh as dist

_numbers = itertools.count()
FILE = ("delete_key", "queue_push", "queue_pop", "queue_len")


@pytest.fixture(scope="module")
def master() -> Iterator[dist.TCPStore]:
    with closing(dist.TCPStore("127.0.0.1", 0, is_master=True)) as store:
        yield store


@pytest.fixture(scope="module")
def clients(master) -> Iterator[list[dist.TCPStore]]:
    first = dist.TCPStore("127.0.0.1", master.port)
    with closing(first), closing(first.clone()) as second:
        yield [first, second]


def prefixed(stores: list, prefix: str = "p") -> list:
    return [dist.PrefixStore(prefix, store) for store in stores]


def test_hash_store():
    def make() -> Subject:
        store = dist.HashStore()
        return Subject([store, store.clone()], [store._store.table])

    drive(make)


@pytest.mark.parametrize("prefix", [False, True])
def test_file_store(tmp_path, prefix):
    made = []

    def make() -> Subject:
        path = tmp_path / str(next(_numbers))
        stores = [dist.FileStore(str(path)) for _ in range(2)]
        made.extend(stores)
        tables = [store._store._table for store in stores]
        return Subject(prefixed(stores) if prefix else stores, tables, hidden=1, unsupported=FILE)

    drive(make, examples=30)
    for store in made:
        store.close()


@pytest.mark.parametrize("prefix", [False, True])
def test_tcp_store(master, clients, prefix):
    stores = [*clients, master, master.clone()]

    def make() -> Subject:
        return Subject(prefixed(stores) if prefix else stores, [master._store.table])

    drive(make)


def test_prefix_stores_in_prefix_stores():
    def make() -> Subject:
        inner = dist.HashStore()
        for key in ("a", "p", "p/a", "other/a", "outer/a"):
            inner.set(key, "not within")
        inner.queue_push("a", "not within")
        return Subject(prefixed(prefixed([inner, inner.clone()]), "outer"), [inner._store.table], hidden=5)

    drive(make)
