"""A store in a file that several processes use."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from rankmesh._stores import methods
from rankmesh._stores.base import DEFAULT_TIMEOUT
from rankmesh._stores.commands import CommandStore
from rankmesh._stores.log import JOIN, LEAVE, SET, Log, Record
from rankmesh._stores.methods import Method
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store import store as agent_store
from rankmesh_agent.store.command import Command, Immediate, Waiting, Write
from rankmesh_agent.store.table import Changes, Table
from rankmesh_agent.wire.errors import DistStoreError, StoreTimeoutError

_LOCK_SECONDS = 60.0
"""Time limit for the file's lock: each operation holds it for microseconds."""
_LEAVE_SECONDS = 2.0
_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.01
"""Seconds between checks of the file while waiting."""
_UNSUPPORTED = {methods.DELETE_KEY, methods.QUEUE_PUSH, methods.QUEUE_POP, methods.QUEUE_LEN}

T = TypeVar("T")


class FileStore(CommandStore):
    """A store in a file, for the processes that can open it; several stores in a process may use one file, too.

    The file is only ever appended to: keys cannot be deleted, and there are no queues.

    Args:
        file_name: path of the file; it is created if needed, in a directory that exists. The keys that an earlier store
            left there stay.
        world_size: number of stores that will use the file in all: when that many are closed, the last one removes it.
            Negative if it is not known: then the file stays.

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
        return super().num_keys() + 1  # torch's FileStore counts its users under a key

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> FileStore:
        found = FileStore(self._path, self._world_size)
        found._timeout = self._timeout
        return found

    def _call(self, method: Method[T], *arguments: Any) -> T:
        if method in _UNSUPPORTED:
            raise self._unsupported_error(method.name)
        return super()._call(method, *arguments)

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, {self._world_size})"


class _FileTable(agent_store.Store):
    """A table that replicates a log."""

    def __init__(self, path: str, world_size: int) -> None:
        self._log = Log(path)
        self._world_size = world_size
        self._table = Table()
        self._users = self._left = 0
        self._mutex = threading.Lock()
        with self._synchronized(Deadline(_LOCK_SECONDS), exclusive=True, create=True):
            self._append(Record(JOIN))

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        if isinstance(command, Waiting):
            return cast(T, self._wait(command))
        assert isinstance(command, Immediate)
        with self._synchronized(Deadline(_LOCK_SECONDS), exclusive=command.writes):
            if isinstance(command, Write):
                return cast(T, self._table.change(command.plan, self._persist))
        return cast(T, command.apply(self._table))

    def close(self) -> None:
        """Release the file, and remove it as its last user."""
        with (
            contextlib.suppress(DistStoreError),  # removed already: then there is nothing to release
            self._synchronized(Deadline(_LEAVE_SECONDS), exclusive=True),
        ):
            self._append(Record(LEAVE))
            if self._users == 0 and 0 <= self._world_size <= self._left:
                self._log.remove()

    def _wait(self, command: Waiting[T]) -> T:
        deadline, pause = Deadline(command.seconds), _MIN_PAUSE
        self._synchronize(deadline)
        future: Future[T] = command.start(self._table)
        try:
            while not future.done() and not deadline.expired():
                wait([future], min(pause, deadline.remaining()))  # another thread may apply the change
                pause = min(2 * pause, _MAX_PAUSE)
                self._synchronize(deadline)
        finally:
            future.cancel()
        if future.cancelled():
            raise command.timeout_error(self._table)
        return future.result()

    def _synchronize(self, deadline: Deadline) -> None:
        if self._log.has_changed():
            with self._synchronized(Deadline(max(deadline.remaining(), _MIN_PAUSE)), exclusive=False):
                pass

    @contextlib.contextmanager
    def _synchronized(self, deadline: Deadline, *, exclusive: bool, create: bool = False) -> Iterator[None]:
        """Lock the file, and bring the table up to date."""
        if not self._mutex.acquire(timeout=deadline.remaining()):
            raise StoreTimeoutError(f"{self._log.path} was in use by another thread for {deadline.seconds:g} s")
        try:
            with self._log.locked(deadline, exclusive=exclusive, create=create):
                self._apply(self._log.read())
                yield
        finally:
            self._mutex.release()

    def _append(self, record: Record) -> None:
        self._log.append([record])
        self._apply([record])

    def _persist(self, changes: Changes) -> None:
        self._log.append(Record(SET, key, value) for key, value in changes.items() if value is not None)

    def _apply(self, records: list[Record]) -> None:
        """Apply records of the log to the table, in one step."""
        values: Changes = {record.key: record.value for record in records if record.kind == SET}
        left = sum(record.kind == LEAVE for record in records)
        self._users += sum(record.kind == JOIN for record in records) - left
        self._left += left
        if values:
            self._table.change(lambda _: (None, values))
