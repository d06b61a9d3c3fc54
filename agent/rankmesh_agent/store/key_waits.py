"""Registry of a store's waits for keys that are under way in this process, for failures to end them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from rankmesh_agent.store.base import KeyWaitInfo, wait_info
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import DistError, RankFailedError, StoreTimeoutError


def failed_wait_error(failure: DistError, missing: DistError) -> RankFailedError | StoreTimeoutError:
    """Return the error of a wait that ends because of a failure.

    Args:
        failure: of a rank; or StoreTimeoutError, if no rank is left that could set a key.
        missing: what the wait would raise now if its time were over.
    """
    kind = StoreTimeoutError if isinstance(failure, StoreTimeoutError) else RankFailedError
    return kind(
        f"{failure.message}: this ends a wait in the job's store; {missing.message}",
        ranks=failure.ranks,
        group=failure.group,
    )


class KeyWait:
    """One wait for keys.

    Args:
        command: the command that waits.

    Attributes:
        command: see above.
        since: when it began, by the monotonic clock.
        failure: the failure that ended it, if any.
    """

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.since = time.monotonic()
        self.failure: DistError | None = None

    def error(self, command: Waiting[Any], table: Table) -> DistError:
        """Return the error of a command whose wait was cancelled, or has timed out."""
        missing = command.timeout_error(table)
        if self.failure is None or not command.seconds:
            return missing
        return failed_wait_error(self.failure, missing)


class KeyWaits:
    """The waits under way of one store. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._futures: dict[Future[Any], KeyWait] = {}
        self._final: DistError | None = None

    def __bool__(self) -> bool:
        return bool(self._futures)

    def pending(self) -> list[KeyWaitInfo]:
        """Return the waits."""
        with self._lock:
            return [wait_info(wait.command, wait.since) for wait in self._futures.values()]

    @contextlib.contextmanager
    def of(self, future: Future[Any], command: Command[Any]) -> Iterator[KeyWait]:
        """Let a failure cancel the future of a command's wait."""
        wait = KeyWait(command)
        with self._lock:
            self._futures[future] = wait
            wait.failure = self._final
        if wait.failure is not None:
            future.cancel()
        try:
            yield wait
        finally:
            with self._lock:
                del self._futures[future]

    def fail(self, failure: DistError, *, for_good: bool) -> None:
        """Cancel the futures; see BlockingStore.fail_waits."""
        with self._lock:
            waits = list(self._futures.items())
            if for_good:
                self._final = failure
        for future, wait in waits:
            wait.failure = wait.failure or failure
            future.cancel()
