"""Interfaces of a store for callers with an event loop, and without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from rankmesh_agent.store.command import Command

CONNECT_SECONDS = 5.0
"""Time limit of a connection attempt to a remote owner."""
RESPONSE_SECONDS = 10.0
"""Time limit of a remote owner's response, besides the time that the command waits."""

T = TypeVar("T")


class AsyncStore(ABC):
    """Keys (text) with values (bytes), and queues of values, that all ranks of a job share."""

    @property
    def local(self) -> AsyncStore:
        """The same store, for requests that another agent has forwarded: it does not forward them again."""
        return self

    @abstractmethod
    async def execute(self, command: Command[T], idempotency_key: str = "") -> T:
        """Execute a command, wait if it has to wait, and return its result.

        Args:
            command: the command; its class documents the result and the errors.
            idempotency_key: a unique name of this call. If a caller does not know whether its command was executed, it
                sends the command again under the same key: the store does not execute it twice but returns the same
                result.

        Raises:
            DistStoreError: the command failed and changed nothing.
            IdempotencyKeyReusedError: the key belongs to another command.
            DistNetworkError: the agent that owns the keys does not respond.
        """

    @abstractmethod
    def cancel_waits(self) -> None:
        """Cancel all waits for keys of this process, so that a server can shut down. From any thread."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections. Call it in the event loop that used the store."""


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
