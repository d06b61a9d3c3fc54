"""Store of a job, as one of its ranks has it: rank 0 owns the keys and values, the others are its clients."""

from __future__ import annotations

import threading
import weakref

from rankmesh_agent.store.base import AsyncStore, BlockingStore
from rankmesh_agent.store.memory import BlockingMemoryStore, MemoryStore
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.stats import StoreStats


class JobStore:
    """Access to the job's store.

    Args:
        rank: this rank.
        owner: rank 0.
        token: the job's token.
        name: name of the server's thread.

    Attributes:
        server: serves the binary protocol; None where another rank has the keys.
    """

    def __init__(self, rank: int, owner: Member, token: str, name: str) -> None:
        self._owner = owner
        self._token = token
        self._lock = threading.Lock()
        self._memory = MemoryStore() if rank == 0 else None
        self._store: AsyncStore | None = self._memory
        self._clients_lock = threading.RLock()
        self._clients: weakref.WeakSet[BlockingStore] = weakref.WeakSet()
        self._final: DistError | None = None
        self.server = StoreServer(self._memory.table, token, name) if self._memory is not None else None

    @property
    def store(self) -> AsyncStore:
        """The store, for callers with an event loop."""
        with self._lock:
            if self._store is None:
                from rankmesh_agent.store.http_client import HttpStore  # httpx takes a quarter of a rank's start

                self._store = HttpStore(self._owner.http, self._token)
            return self._store

    def blocking(self) -> BlockingStore:
        """Return the store for callers without an event loop; the caller closes it."""
        store: BlockingStore
        if self._memory is not None:
            store = BlockingMemoryStore(self._memory.table)
        else:
            from rankmesh_agent.store.client import StoreClient

            store = StoreClient(self._owner.http, self._token, self._owner)
        with self._clients_lock:
            self._clients.add(store)
            final = self._final
        if final is not None:
            store.fail_waits(final, for_good=True)
        return store

    def stats(self) -> StoreStats | None:
        """Return counts of the keys and commands; None where another rank has them."""
        return None if self._memory is None else self._memory.table.vitals()

    def waiting(self) -> bool:
        """Return whether a command of this rank waits."""
        with self._clients_lock:
            return any(store.waits_under_way() for store in self._clients)

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """End the waits of this rank that are under way; see BlockingStore.fail_waits."""
        with self._clients_lock:
            stores = list(self._clients)
            if for_good:
                self._final = failure
        for store in stores:
            store.fail_waits(failure, for_good=for_good)
        if self._memory is not None:
            self._memory.fail_waits(failure, for_good=for_good)

    def cancel_waits(self) -> None:
        """End the commands that wait."""
        if self._store is not None:
            self._store.cancel_waits()

    async def aclose(self) -> None:
        """Close the resources that belong to the running event loop, which ends."""
        if self._store is not None:
            await self._store.close()
