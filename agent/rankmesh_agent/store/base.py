"""A store for callers with an event loop, wherever its keys and values are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from rankmesh_agent.store.command import Command

CONNECT_SECONDS = 5.0
"""How long an owner elsewhere may take to accept a connection."""
RESPONSE_SECONDS = 10.0
"""How long an owner elsewhere may take to answer, besides the time it was asked to wait."""

T = TypeVar("T")


class AsyncStore(ABC):
    """Keys (text) with values (bytes), and queues of values, that all ranks of a job share."""

    @abstractmethod
    async def execute(self, command: Command[T], once: str = "") -> T:
        """Carry out a command, wait if it is one that waits, and return its result.

        Args:
            command: what to do; its class says what it returns and raises.
            once: a name of this call that no other call has. A command that comes again under the same name, because
                its caller does not know whether it has got through, is not carried out again but gets the same result.

        Raises:
            DistStoreError: the command failed; nothing has changed.
            IdempotencyKeyReusedError: another command came under the same name.
            DistNetworkError: the keys are at another agent that does not answer.
        """

    @abstractmethod
    def cancel_waits(self) -> None:
        """Send away all who wait for keys of this process, so that a server can shut down. From any thread."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what the store holds besides memory. Call it in the event loop that used the store."""
