"""A store in a file that several processes use."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, TypeVar

from rankmesh._stores import methods
from rankmesh._stores.base import DEFAULT_TIMEOUT
from rankmesh._stores.commands import CommandStore
from rankmesh._stores.methods import Method
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store import store as agent_store
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire.errors import DistStoreError

_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.01
"""Seconds between checks of the file while waiting."""
_UNSUPPORTED = {methods.DELETE_KEY, methods.QUEUE_PUSH, methods.QUEUE_POP, methods.QUEUE_LEN}

T = TypeVar("T")


class FileStore(CommandStore):
    """A store in a file, for the processes that can open it; several stores in a process may use one file, too.

    The file is an SQLite database, beside which there is a journal. Keys cannot be deleted, and there are no queues.

    Args:
        file_name: path of the file; it is created if needed, in a directory that exists. The keys that an earlier store
            left there stay.
        world_size: number of stores that will use the file in all: when that many are closed, the last one removes it.
            Negative if it is not known: then the file stays.

    Raises:
        TypeError: an argument is of the wrong type.
        DistStoreError: the file cannot be used, or is not a store's.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        if not isinstance(world_size, int):
            raise TypeError(f"world_size must be an int, got {type(world_size).__qualname__}")
        self._path = os.fspath(file_name)
        if not isinstance(self._path, str):
            raise TypeError(f"file_name must be a str, got {type(file_name).__qualname__}")
        self._world_size = world_size
        super().__init__(_FileStore(self._path, world_size), DEFAULT_TIMEOUT)

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

    def _after_fork(self) -> None:
        super()._after_fork()
        if isinstance(self._store, _FileStore):
            self._store.file.reopen_in_child()

    def _call(self, method: Method[T], *arguments: Any) -> T:
        if method in _UNSUPPORTED:
            raise self._unsupported_error(method.name)
        return super()._call(method, *arguments)

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, {self._world_size})"


class _FileStore(agent_store.Store):
    """Executes commands on a file's keys."""

    def __init__(self, path: str, world_size: int) -> None:
        from rankmesh._stores.key_file import KeyFile  # SQLite is loaded with the first store

        self.file = KeyFile(path, user=True)
        self._world_size = world_size

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        deadline, pause = Deadline(command.seconds), _MIN_PAUSE
        while (executed := command.try_execute(self.file)) is None:
            if deadline.expired():
                assert isinstance(command, Waiting)
                raise command.timeout_error(self.file)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, _MAX_PAUSE)
        return executed[0]

    def close(self) -> None:
        """Release the file, and remove it as its last user."""
        with contextlib.suppress(DistStoreError):  # removed already: then there is nothing to release
            self.file.leave(self._world_size)
        self.file.close()
