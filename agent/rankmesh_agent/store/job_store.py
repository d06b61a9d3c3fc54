"""Store of a job, as one of its ranks uses it: the gateway has the keys and values."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rankmesh_agent.store.async_store import AsyncStore
from rankmesh_agent.store.base import KeyWaitInfo
from rankmesh_agent.store.client import Call, StoreClient, remaining
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.key_waits import failed_wait_error
from rankmesh_agent.wire.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreLostError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between attempts to reach the gateway."""

T = TypeVar("T")


class JobStore:
    """Access of one rank to its job's store.

    Args:
        url: base URL of the job's gateway.
        token: the job's token.
        store: id of the store, 32 hexadecimal digits.
        limits: returns the ranks that have had no free descriptor since a time, with their reports.

    Attributes:
        id: id of the store.
        asynchronous: the store for callers with an event loop.
    """

    def __init__(
        self,
        url: str,
        token: str,
        store: str,
        limits: Callable[[float], Sequence[tuple[Member, str]]] = lambda since: (),
    ) -> None:
        if len(store) != 2 * STORE_ID_BYTES:
            raise ProtocolError(f"the gateway at {url} does not name the job's store: is it of an earlier version?")
        self.id = store
        self._url, self._token = url, token
        self._limits = limits
        self._lock = threading.RLock()  # reentrant: the garbage collector may close stores at any time
        self._clients: weakref.WeakSet[JobStoreClient] = weakref.WeakSet()
        self._final: DistError | None = None
        self._closed = False
        self.asynchronous = AsyncStore(self.blocking)

    def blocking(self) -> JobStoreClient:
        """Return the store for callers without an event loop; the caller closes it."""
        store = JobStoreClient(self._url, self._token, bytes.fromhex(self.id), self._wait_error)
        with self._lock:
            self._clients.add(store)
            final = self._final
            if self._closed:
                store.close()
        if final is not None:
            store.fail_waits(final, for_good=True)
        return store

    def check_same(self, store: str) -> None:
        """Raise StoreLostError unless the job still has this store, under the id ``store``."""
        if store != self.id:
            raise StoreLostError(
                f"the job's store is lost: its gateway at {self._url} was started after the job, without the file of "
                "its state (rankmesh gateway --state FILE, or --store)"
            )

    def waiting(self) -> bool:
        """Return whether a command of this rank waits."""
        with self._lock:
            return any(store.waits_under_way() for store in self._clients)

    def pending_waits(self) -> list[KeyWaitInfo]:
        """Return the waits of this rank that are under way."""
        with self._lock:
            return [wait for store in self._clients for wait in store.pending_waits()]

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """End the waits of this rank that are under way; see BlockingStore.fail_waits."""
        with self._lock:
            stores = list(self._clients)
            if for_good:
                self._final = failure
        for store in stores:
            store.fail_waits(failure, for_good=for_good)

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        with self._lock:
            self._closed = True
            stores = list(self._clients)
        for store in stores:
            store.close()

    def _wait_error(self, command: Command[T], error: DistStoreError) -> DistStoreError:
        """Return the error of a command that waited in vain; the cause may be a rank that has no free descriptor."""
        limits = self._limits(time.monotonic() - command.seconds) if command.seconds else ()
        if not limits:
            return error
        reports = "; ".join(f"{member.described()} reports: {text}" for member, text in limits)
        return StoreTimeoutError(
            f"waited {command.seconds:g} s, but {error.message}; {reports}", ranks=[member.rank for member, _ in limits]
        )


class JobStoreClient(StoreClient):
    """The job's store for callers without an event loop. While the gateway is away, calls wait for it.

    Args:
        url: base URL of the gateway.
        token: the job's token.
        store: id of the store.
        wait_error: returns the error of a command that waited in vain, given the server's.
    """

    def __init__(
        self,
        url: str,
        token: str,
        store: bytes,
        wait_error: Callable[[Command[Any], DistStoreError], DistStoreError],
    ) -> None:
        super().__init__(url, token, store)
        self._wait_error = wait_error

    def execute(self, command: Command[T], timeout: float | None = None, call: Call | None = None) -> T:
        timeout = left = self.limit(command) if timeout is None else timeout
        call = call or Call(self.failures_before())
        ends, pause, wanted = time.monotonic() + command.seconds, _FIRST_PAUSE, command
        over = ends + timeout
        while True:
            try:
                return super().execute(command, left, call)
            except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
                if isinstance(error, StoreUnresponsiveError):
                    raise self.unresponsive_error(wanted, timeout) from error
                raise self._wait_error(wanted, error) from None
            except DistNetworkError as error:
                if not call.may_be_repeated(error) or time.monotonic() + pause >= over or self._pool.closed:
                    raise
                failure = self.failure_since(call.failures) if wanted.seconds else None
                if failure is not None:
                    raise failed_wait_error(failure, error) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            command = remaining(command, ends)
            left = min(timeout, over - time.monotonic())

    def _name(self) -> str:
        return f"the job's store, at the gateway at {self._url},"
