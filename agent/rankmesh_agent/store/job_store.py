"""Store of a job, as one of its ranks has it: rank 0 owns the keys and values, the others are its clients."""

from __future__ import annotations

import threading

from rankmesh_agent.store.base import AsyncStore, BlockingStore
from rankmesh_agent.store.memory import BlockingMemoryStore, MemoryStore
from rankmesh_agent.store.server import StoreServer
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
        if self._memory is not None:
            return BlockingMemoryStore(self._memory.table)
        from rankmesh_agent.store.client import StoreClient

        return StoreClient(self._owner.http, self._token, self._owner.described())

    def stats(self) -> StoreStats | None:
        """Return counts of the keys and commands; None where another rank has them."""
        return None if self._memory is None else self._memory.table.vitals()

    def cancel_waits(self) -> None:
        """End the commands that wait."""
        if self._store is not None:
            self._store.cancel_waits()

    async def aclose(self) -> None:
        """Close the resources that belong to the running event loop, which ends."""
        if self._store is not None:
            await self._store.close()
