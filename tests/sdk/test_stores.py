"""Every store of the SDK beside the model, through calls and waits chosen at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
from support.store_machine import Subject, drive

import rankmesh as dist

pytestmark = pytest.mark.slow

FILE = ("delete_key", "queue_push", "queue_pop", "queue_len")


def prefixed(stores: list, prefix: str = "p") -> list:
    return [dist.PrefixStore(prefix, store) for store in stores]


class FileSubject(Subject):
    """Stores of one file, whose waits are calls under way."""

    def __init__(self, stores: list[dist.FileStore], *, prefix: bool) -> None:
        self.waiting: set[object] = set()
        self.files = [store._store for store in stores]
        for file in self.files:
            file.execute = self.counted(file.execute)
        super().__init__(prefixed(stores) if prefix else stores, [], hidden=1, unsupported=FILE)

    def counted(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def call(command: Any, timeout: float | None = None) -> Any:
            mark = object()
            if command.seconds:
                self.waiting.add(mark)
            try:
                return execute(command, timeout)
            finally:
                self.waiting.discard(mark)

        return call

    def registered(self) -> int:
        return len(self.waiting)

    def clear(self) -> None:
        self.files[0].file.change(lambda values: (None, dict.fromkeys(values)))


def test_hash_store():
    def make() -> Subject:
        store = dist.HashStore()
        return Subject([store, store.clone()], [store._store.table])

    drive(make)


@pytest.mark.parametrize("prefix", [False, True])
def test_file_store(tmp_path, prefix):
    numbers = itertools.count()
    with ExitStack() as made:

        def make() -> Subject:
            path = str(tmp_path / str(next(numbers)))
            stores = [made.enter_context(closing(dist.FileStore(path))) for _ in range(2)]
            return FileSubject(stores, prefix=prefix)

        drive(make, examples=15 if prefix else 30)


def test_tcp_store():
    with (
        closing(dist.TCPStore("127.0.0.1", 0, is_master=True)) as master,
        closing(dist.TCPStore("127.0.0.1", master.port)) as client,
        closing(client.clone()) as another,
        closing(master.clone()) as second,
    ):
        drive(lambda: Subject([client, another, master, second], [master._store.table]), examples=30)


def test_prefix_stores_in_prefix_stores():
    def make() -> Subject:
        inner = dist.HashStore()
        for key in ("a", "p", "p/a", "other/a", "outer/a"):
            inner.set(key, "not within")
        inner.queue_push("a", "not within")
        return Subject(prefixed(prefixed([inner, inner.clone()]), "outer"), [inner._store.table], hidden=5)

    drive(make, examples=30)
