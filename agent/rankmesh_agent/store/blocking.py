"""A store for callers without an event loop."""

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
    """Keys and values, wherever they are; several threads may use it at a time."""

    @abstractmethod
    def execute(self, command: Command[T]) -> T:
        """Carry out a command, wait if it is one that waits, and return its result. Ctrl-C ends the wait.

        Raises:
            DistStoreError: the command failed; nothing has changed.
            DistNetworkError: the keys are at another place that does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the store holds besides memory."""

    def close_in_child(self) -> None:  # noqa: B027  # most have nothing of the kind
        """In a forked child: let go of the parent's descriptors; the store is not used any more."""


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
        future: Future[T] = command.begin(self.table)
        over, deadline = threading.Event(), Deadline(command.seconds)
        future.add_done_callback(lambda _: over.set())  # futures.wait would not be told of a cancelled one
        try:
            while not over.wait(deadline.remaining()) and not deadline.expired():
                pass
        except BaseException:
            if not future.cancel():
                command.undo(self.table, future.result())
            raise
        if future.cancel():
            raise command.late(self.table)
        return future.result()

    def close(self) -> None:
        """Nothing to let go of."""
