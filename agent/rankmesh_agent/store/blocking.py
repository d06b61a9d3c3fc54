"""Interface of a store for callers without an event loop, and its implementation on a local table."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.table import Table

T = TypeVar("T")


class BlockingStore(ABC):
    """Keys and values, local or remote; several threads may use it at a time."""

    @abstractmethod
    def execute(self, command: Command[T]) -> T:
        """Execute a command, wait if it has to wait, and return its result. Ctrl-C ends the wait.

        Raises:
            DistStoreError: the command failed and changed nothing.
            DistNetworkError: the remote owner of the keys does not respond.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections, files and whatever else the store holds besides memory."""

    def close_in_child(self) -> None:  # noqa: B027  # most stores hold no descriptors
        """In a forked child: close the parent's descriptors; the store is not used any more."""


class BlockingMemoryStore(BlockingStore):
    """Keys and values in this process.

    Args:
        table: the keys and values.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def execute(self, command: Command[T]) -> T:
        self.table.count_call(command.name)
        found: tuple[T] | None = command.try_execute(self.table)
        if found is not None:
            return found[0]
        assert isinstance(command, Waiting)
        future: Future[T] = command.start(self.table)
        done, deadline = threading.Event(), Deadline(command.seconds)
        future.add_done_callback(lambda _: done.set())  # futures.wait does not return for a cancelled future
        try:
            while not done.wait(deadline.remaining()) and not deadline.expired():
                pass
        except BaseException:
            if not future.cancel():
                command.undo(self.table, future.result())
            raise
        if future.cancel():
            raise command.timeout_error(self.table)
        return future.result()

    def close(self) -> None:
        """Do nothing: a table holds only memory."""
