"""A store in a file that several processes use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TypeVar, cast

from rankmesh._stores.base import DEFAULT_TIMEOUT, Text
from rankmesh._stores.commands import CommandStore
from rankmesh._stores.log import CAME, LEFT, SET, Log, Record
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Immediate, Waiting, Write
from rankmesh_agent.store.table import Changes, Table
from rankmesh_agent.wire.errors import DistStoreError, StoreTimeoutError

_LOCK_SECONDS = 60.0
"""How long others may keep the file locked: each operation takes microseconds."""
_LEAVE_SECONDS = 2.0
_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.01
"""Seconds between looks at the file while waiting."""

T = TypeVar("T")


class FileStore(CommandStore):
    """A store in a file, for the processes that can open it; several stores in a process may use one file, too.

    Keys cannot be deleted, and there are no queues.

    Args:
        file_name: path of the file; it is made if needed, in a directory that exists. What an earlier store left there
            is kept.
        world_size: how many stores will use the file in all: when that many are closed, the last one removes it.
            Negative if that is not known: then the file stays.

    Raises:
        TypeError: an argument is of the wrong type.
        DistStoreError: the file cannot be used, or is not a store's.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.FileStore
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        if not isinstance(world_size, int):
            raise TypeError(f"world_size must be an int, got {type(world_size).__qualname__}")
        self._path = os.fspath(file_name)
        if not isinstance(self._path, str):
            raise TypeError(f"file_name must be a str, got {type(file_name).__qualname__}")
        self._world_size = world_size
        super().__init__(_FileTable(self._path, world_size), DEFAULT_TIMEOUT)

    @property
    def path(self) -> str:
        """The file's path, as it was given."""
        return self._path

    def num_keys(self) -> int:
        return super().num_keys() + 1  # the file's users are counted in it, too

    def delete_key(self, key: str) -> bool:
        """Refused: the file is only ever appended to.

        Raises:
            UnsupportedStoreError: always.
        """
        self._refuse("delete_key")

    def queue_push(self, key: str, value: Text) -> None:
        self._refuse("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        self._refuse("queue_pop")

    def queue_len(self, key: str) -> int:
        self._refuse("queue_len")

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> FileStore:
        twin = FileStore(self._path, self._world_size)
        twin._timeout = self._timeout
        return twin

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, {self._world_size})"


class _FileTable(BlockingStore):
    """A table that follows a log."""

    def __init__(self, path: str, world_size: int) -> None:
        self._log = Log(path)
        self._world_size = world_size
        self._table = Table()
        self._users = self._left = 0
        self._mutex = threading.Lock()
        with self._following(Deadline(_LOCK_SECONDS), alone=True, create=True):
            self._append(Record(CAME))

    def execute(self, command: Command[T]) -> T:
        if isinstance(command, Waiting):
            return cast(T, self._wait(command))
        assert isinstance(command, Immediate)
        with self._following(Deadline(_LOCK_SECONDS), alone=command.writes):
            if isinstance(command, Write):
                return cast(T, self._table.change(command.plan, self._keep))
        return cast(T, command.apply(self._table))

    def close(self) -> None:
        """Leave the file, and remove it as its last user."""
        with (
            contextlib.suppress(DistStoreError),  # gone already: then there is nothing to leave
            self._following(Deadline(_LEAVE_SECONDS), alone=True),
        ):
            self._append(Record(LEFT))
            if self._users == 0 and 0 <= self._world_size <= self._left:
                self._log.remove()

    def _wait(self, command: Waiting[T]) -> T:
        deadline, pause = Deadline(command.seconds), _FIRST_PAUSE
        self._catch_up(deadline)
        future: Future[T] = command.begin(self._table)
        try:
            while not future.done() and not deadline.expired():
                wait([future], min(pause, deadline.remaining()))  # another thread may bring the news
                pause = min(2 * pause, _LAST_PAUSE)
                self._catch_up(deadline)
        finally:
            future.cancel()
        if future.cancelled():
            raise command.late(self._table)
        return future.result()

    def _catch_up(self, deadline: Deadline) -> None:
        if self._log.has_news():
            with self._following(Deadline(max(deadline.remaining(), _FIRST_PAUSE)), alone=False):
                pass

    @contextlib.contextmanager
    def _following(self, deadline: Deadline, *, alone: bool, create: bool = False) -> Iterator[None]:
        """Lock the file, and bring the table up to date."""
        if not self._mutex.acquire(timeout=deadline.remaining()):
            raise StoreTimeoutError(f"{self._log.path} was in use by another thread for {deadline.seconds:g} s")
        try:
            with self._log.locked(deadline, alone=alone, create=create):
                self._learn(self._log.read())
                yield
        finally:
            self._mutex.release()

    def _append(self, record: Record) -> None:
        self._log.append([record])
        self._learn([record])

    def _keep(self, changes: Changes) -> None:
        self._log.append(Record(SET, key, value) for key, value in changes.items() if value is not None)

    def _learn(self, records: list[Record]) -> None:
        """Take over what others have written."""
        values: Changes = {record.key: record.value for record in records if record.kind == SET}
        left = sum(record.kind == LEFT for record in records)
        self._users += sum(record.kind == CAME for record in records) - left
        self._left += left
        if values:
            self._table.change(lambda _: (None, values))
