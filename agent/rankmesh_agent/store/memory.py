"""The store of the process that has the keys and values itself."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.base import BlockingStore, KeyWaitInfo
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import QueuePop
from rankmesh_agent.store.key_waits import KeyWaits
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import DistError

T = TypeVar("T")


class BlockingMemoryStore(BlockingStore):
    """Keys and values in this process.

    Args:
        table: the keys and values.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._waits = KeyWaits()

    def waits_under_way(self) -> bool:
        return bool(self._waits)

    def pending_waits(self) -> list[KeyWaitInfo]:
        return self._waits.pending()

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        super().fail_waits(failure, for_good=for_good)
        self._waits.fail(failure, for_good=for_good)

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        self.table.count_call(command.name)
        found: tuple[T] | None = command.try_execute(self.table)
        if found is not None:
            return found[0]
        return _wait_here(command, self.table, self._waits)

    def undo(self, command: QueuePop, value: bytes) -> None:
        command.undo(self.table, value)

    def close(self) -> None:
        """Do nothing: a table holds only memory."""


def _wait_here(command: Command[T], table: Table, waits: KeyWaits) -> T:
    """Wait for a command that has to wait, and return its result. Ctrl-C ends the wait, and so does a failure."""
    assert isinstance(command, Waiting)
    future: Future[T] = command.start(table)
    done, deadline = threading.Event(), Deadline(command.seconds)
    future.add_done_callback(lambda _: done.set())  # futures.wait does not return for a cancelled future
    try:
        with waits.of(future, command) as wait:
            while not done.wait(deadline.remaining()) and not deadline.expired():
                pass
    except BaseException:
        if not future.cancel():
            command.undo(table, future.result())
        raise
    if future.cancel():
        raise wait.error(command, table)
    return future.result()
