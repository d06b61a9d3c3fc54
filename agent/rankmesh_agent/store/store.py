"""Interface of a store, and the store of the process that has the table itself."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import QueuePop, QueuePush
from rankmesh_agent.store.table import Table

RESPONSE_SECONDS = 300.0
"""Default time limit of a call whose command does not wait."""
MARGIN_SECONDS = 1.5
"""Time limit of the response to a command that waits, after the server's own limit."""

T = TypeVar("T")


class Store(ABC):
    """Keys and values, local or remote; several threads may use it at a time."""

    @abstractmethod
    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        """Execute a command, wait if it has to wait, and return its result. Ctrl-C ends the wait.

        Args:
            command: the command; its class documents the result and the errors.
            timeout: seconds in which a remote server must respond, besides the time that the command waits: the limit
                of connecting, sending and receiving together; ``response_seconds`` if left out. Local stores have no
                use for it.

        Raises:
            DistStoreError: the command failed and changed nothing.
            StoreUnresponsiveError: the server of the keys did not respond in time. It may execute the command
                yet.
            DistNetworkError: the server of the keys is gone.
        """

    def undo(self, command: QueuePop, value: bytes) -> None:
        """Return a value to its queue; to the end of it where the server is remote."""
        self.execute(QueuePush(command.key, value))

    def close(self) -> None:  # noqa: B027
        """Release connections, files and whatever else the store holds besides memory; nothing, by default."""


class LocalStore(Store):
    """Keys and values in this process."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        self.table.count_call(command.name)
        executed = command.try_execute(self.table)
        if executed is not None:
            return executed[0]
        assert isinstance(command, Waiting)
        future: Future[T] = command.start(self.table)
        try:
            return future.result(min(command.seconds, threading.TIMEOUT_MAX))
        except (TimeoutError, CancelledError):
            if future.cancel():  # or it was cancelled already, as the table is closed
                raise command.timeout_error(self.table) from None
            return future.result()
        except BaseException:  # Ctrl-C
            if not future.cancel():
                command.undo(self.table, future.result())
            raise


def response_seconds(command: Command[T]) -> float:
    """Return the default time limit of a command, besides the time that it waits."""
    return MARGIN_SECONDS if command.seconds else RESPONSE_SECONDS
