"""Interface of a store for callers without an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from rankmesh_agent.store.command import Command
from rankmesh_agent.store.commands import QueuePop, QueuePush
from rankmesh_agent.wire.errors import DistError, StoreUnresponsiveError

CONNECT_SECONDS = 25.0
"""Time limit of a connection attempt: a host whose kernel has not acknowledged it by then has vanished."""
RESPONSE_SECONDS = 300.0
"""Default time limit of a call whose command does not wait."""
MARGIN_SECONDS = 1.5
"""Time limit of the response to a command that waits, after the server's own limit."""

T = TypeVar("T")


class KeyWaitInfo(NamedTuple):
    """A wait for keys under way, for diagnosis.

    Attributes:
        op: name of the call.
        keys: the keys.
        since: when it began, by the monotonic clock.
        seconds: its timeout.
    """

    op: str
    keys: Sequence[str]
    since: float
    seconds: float


def wait_info(command: Command[Any], since: float) -> KeyWaitInfo:
    """Return the description of a command that has waited since a time by the monotonic clock."""
    keys = getattr(command, "keys", None) or (getattr(command, "key", ""),)
    return KeyWaitInfo(command.name, keys, since, command.seconds)


class BlockingStore(ABC):
    """Keys and values, local or remote; several threads may use it at a time.

    Attributes:
        timeout: seconds in which a remote server must respond to a command that does not wait.
        failures: the failures that have ended waits, see fail_waits.
    """

    timeout: float = RESPONSE_SECONDS
    failures: tuple[DistError, ...] = ()
    _lasting: int | None = None
    """Place of the failure that ends all later waits, too; None for none."""

    @abstractmethod
    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        """Execute a command, wait if it has to wait, and return its result. Ctrl-C ends the wait.

        Args:
            command: the command.
            timeout: seconds in which a remote server must respond, besides the time that the command waits: the limit
                of connecting, sending and receiving together. If left out, MARGIN_SECONDS for a command that waits, and
                the store's timeout for others. Local stores have no use for it.

        Raises:
            DistStoreError: the command failed and changed nothing.
            StoreUnresponsiveError: the server of the keys did not respond in time. It may execute the command
                yet.
            DistNetworkError: the server of the keys is gone.
        """

    def undo(self, command: QueuePop, value: bytes) -> None:
        """Return a value to its queue; to the end of it where the server is remote."""
        self.execute(QueuePush(command.key, value))

    @abstractmethod
    def close(self) -> None:
        """Release connections, files and whatever else the store holds besides memory."""

    def waits_under_way(self) -> bool:
        """Return whether a wait may be under way."""
        return False

    def pending_waits(self) -> list[KeyWaitInfo]:
        """Return the waits under way. From any thread."""
        return []

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """End the waits under way for keys that are not set, with RankFailedError. From any thread; does not block.

        Args:
            failure: the reason; a rank that has failed, say.
            for_good: whether later waits end at once, too.
        """
        self.failures = (*self.failures, failure)
        if for_good and self._lasting is None:
            self._lasting = len(self.failures) - 1

    def failures_before(self) -> tuple[DistError, ...]:
        """Return the failures that do not end a wait which begins now."""
        return self.failures[: self._lasting]

    def failure_since(self, failures: tuple[DistError, ...]) -> DistError | None:
        """Return the first failure after these, None if there is none."""
        return self.failures[len(failures)] if len(self.failures) > len(failures) else None

    def limit(self, command: Command[T]) -> float:
        """Return the default time limit of a command, besides the time that it waits."""
        return MARGIN_SECONDS if command.seconds else self.timeout


def unresponsive_error(store: str, url: str, command: Command[T], timeout: float) -> StoreUnresponsiveError:
    """Return the error of a call whose remote server did not respond in time.

    Args:
        store: the store, as text.
        url: its URL.
        command: the command.
        timeout: the time limit, besides the time that the command waits.
    """
    limit = f"{round(command.seconds, 1):g} s and " if command.seconds else ""
    limit += f"{round(timeout, 1):g} s{' more' if limit else ''}"
    return StoreUnresponsiveError(
        f"{store} cannot be reached: timed out: its server did not respond to {command.name} within {limit}. "
        "Is that process stopped, or does a call there hold the interpreter's lock? A longer timeout waits for it",
        address=url,
    )
