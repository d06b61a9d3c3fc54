"""Store of a job, as one of its ranks uses it: the gateway has the keys and values."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rankmesh_agent.store.client import Call, KeyWaitInfo, StoreClient
from rankmesh_agent.wire.errors import (
    DistError,
    DistStoreError,
    ProtocolError,
    RankFailedError,
    StoreLostError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES

Limits = Callable[[float], Sequence[tuple[Member, str]]]
"""Returns the ranks that have had no free descriptor since a time, with their reports."""


class JobStore:
    """Access of one rank to its job's store.

    Args:
        url: base URL of the job's gateway.
        token: the job's token.
        store: id of the store, 32 hexadecimal digits.
        limits: see Limits.

    Attributes:
        id: id of the store.
        shared: a client that is closed with this object.
    """

    def __init__(self, url: str, token: str, store: str, limits: Limits = lambda since: ()) -> None:
        if len(store) != 2 * STORE_ID_BYTES:
            raise ProtocolError(f"the gateway at {url} does not name the job's store: is it of an earlier version?")
        self.id = store
        self._url, self._token = url, token
        self._limits = limits
        self._lock = threading.RLock()  # reentrant: the garbage collector may close stores at any time
        self._clients: weakref.WeakSet[JobStoreClient] = weakref.WeakSet()
        self._final: DistError | None = None
        self._closed = False
        self.shared = self.client()

    def client(self) -> JobStoreClient:
        """Return a client of the store; the caller closes it."""
        client = JobStoreClient(self._url, self._token, bytes.fromhex(self.id), self._limits)
        with self._lock:
            self._clients.add(client)
            final = self._final
            if self._closed:
                client.close()
        if final is not None:
            client.fail_waits(final, for_good=True)
        return client

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
            return any(client.waits_under_way() for client in self._clients)

    def pending_waits(self) -> list[KeyWaitInfo]:
        """Return the waits of this rank that are under way."""
        with self._lock:
            return [wait for client in self._clients for wait in client.pending_waits()]

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """End the waits of this rank that are under way; see StoreClient.fail_waits."""
        with self._lock:
            clients = list(self._clients)
            if for_good:
                self._final = failure
        for client in clients:
            client.fail_waits(failure, for_good=for_good)

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        with self._lock:
            self._closed = True
            clients = list(self._clients)
        for client in clients:
            client.close()


class JobStoreClient(StoreClient):
    """Client of a job's store. While the gateway is away, calls wait for it.

    Args:
        url: base URL of the gateway.
        token: the job's token.
        store: id of the store.
        limits: see Limits.
    """

    returns = True

    def __init__(self, url: str, token: str, store: bytes, limits: Limits = lambda since: ()) -> None:
        super().__init__(url, token, store)
        self._limits = limits

    def _wait_error(self, call: Call[Any], error: DistStoreError) -> DistStoreError | RankFailedError:
        seconds, found = call.command.seconds, super()._wait_error(call, error)
        limits = self._limits(time.monotonic() - seconds) if seconds else ()
        if not limits:  # else the cause may be a rank that has no free descriptor
            return found
        reports = "; ".join(f"{member.described()} reports: {text}" for member, text in limits)
        return StoreTimeoutError(
            f"waited {seconds:g} s, but {found.message}; {reports}", ranks=[member.rank for member, _ in limits]
        )

    def _name(self) -> str:
        return f"the job's store, at the gateway at {self._url},"
