"""Store of a job, as one of its ranks has it: one rank owns the keys and values, the others are its clients."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rankmesh_agent.store.base import AsyncStore, BlockingStore, KeyWaitInfo
from rankmesh_agent.store.commands import MultiSet, QueuePush
from rankmesh_agent.store.failover import AsyncJobStore, BlockingJobStore, OwnerCache
from rankmesh_agent.store.memory import BlockingMemoryStore, MemoryStore
from rankmesh_agent.store.ownership import LostRanks, Ownership
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import UNLIMITED, Quota
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import DistError, DistStoreError
from rankmesh_agent.wire.schemas import Member
from rankmesh_agent.wire.stats import StoreStats

_BATCH_BYTES = 1 << 20
_BATCH_KEYS = 1 << 12


class JobStore:
    """Access to the job's store.

    Args:
        rank: this rank.
        members: all ranks, by rank.
        credentials: the job's token, or all its credentials.
        name: name of the server's thread.
        lost: returns the ranks that have failed or left, as this rank knows: see Ownership.
        has_left: returns whether this rank has left the job.
        limits: returns the ranks that have had no free descriptor since a time: see OwnerCache.
        on_unreachable: called with a rank whose store does not answer; ``lost`` tells later whether it has ended.
        quota: limits of the keys and values.

    Attributes:
        store: the store, for callers with an event loop.
        server: serves the binary protocol.
    """

    def __init__(
        self,
        rank: int,
        members: Mapping[int, Member],
        credentials: str | Credentials,
        name: str,
        lost: LostRanks,
        has_left: Callable[[], bool],
        limits: Callable[[float], Mapping[int, str]] = lambda since: {},
        on_unreachable: Callable[[int], None] = lambda rank: None,
        quota: Quota = UNLIMITED,
    ) -> None:
        self._token = token = Credentials.of(credentials).of_own_job
        self._lock = threading.RLock()
        self._clients: weakref.WeakSet[BlockingStore] = weakref.WeakSet()
        self._final: DistError | None = None
        self._ownership: Ownership | None = None
        if len(members) > 1:
            self._memory = MemoryStore(quota)
            self._ownership = Ownership(rank, members, token, self._memory.table, lost)
            self._memory.ownership = self._ownership
            self._owners = OwnerCache(self._ownership, members, has_left)
            self._owners.limits, self._owners.on_unreachable = limits, on_unreachable
            self.store: AsyncStore = AsyncJobStore(self._owners, self._memory, token)
        else:
            self.store = self._memory = MemoryStore(quota)
        self.server = StoreServer(self._memory.table, credentials, name, self._ownership)

    def start(self) -> None:
        """Open the journal of this host, and find a replica; once all ranks have made their JobStore."""
        if self._ownership is not None:
            self._ownership.start()

    def blocking(self) -> BlockingStore:
        """Return the store for callers without an event loop; the caller closes it."""
        store: BlockingStore
        if self._ownership is None:
            store = BlockingMemoryStore(self._memory.table)
        else:
            store = BlockingJobStore(self._owners, self._memory.table, self._token)
        with self._lock:
            self._clients.add(store)
            final = self._final
        if final is not None:
            store.fail_waits(final, for_good=True)
        return store

    def stats(self) -> StoreStats | None:
        """Return counts of the keys and commands; None where another rank has them."""
        owned = self._ownership is None or self._ownership.owned
        return self._memory.table.vitals() if owned else None

    def check(self) -> None:
        """End the waits of clients here if another rank has become the owner. Called from time to time."""
        if self._ownership is not None and self._ownership.superseded():
            self._memory.table.cancel_waits()

    def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these ranks, dead or not."""
        if self._ownership is not None:
            self._ownership.exclude(ranks)
            owner = self._ownership.owner()
            if owner is not None:
                self._owners.current = owner

    def renumber(self, world: Sequence[int]) -> None:
        """Name the ranks in errors by their places in the world, which has shrunk, from now on."""
        if self._ownership is not None:
            self._owners.renumber(world)

    def copy_to(self, other: JobStore, *, reachable: bool) -> None:
        """Copy the values and queues to the store of another epoch, if this rank has them; waits are not copied.

        Args:
            other: this rank's access to that store.
            reachable: whether its server can be reached at the owner's address by now.

        Raises:
            DistStoreError: another rank owns that store, and cannot be reached.
        """
        if self._ownership is not None and not self._ownership.acquire():
            return
        if not reachable and other._ownership is not None and not other._ownership.owned:
            raise DistStoreError(
                "the store of the larger world is at another rank than this one's, to which the agent of an attached "
                "process cannot copy it: destroy the process group, and start all ranks again"
            )
        table = self._memory.table
        with table.lock:
            values, queues = table.contents()
            pairs = list(values.items())
            queued = [(key, value) for key, queue in queues.items() for value in queue]
        store = other.blocking()
        try:
            for batch in _batches(pairs):
                store.execute(MultiSet(tuple(batch)))
            for key, value in queued:
                store.execute(QueuePush(key, value))
        finally:
            store.close()

    def leave(self) -> None:
        """Give up the ownership: the next rank takes over."""
        if self._ownership is not None:
            self._ownership.leave()

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
        self.store.fail_waits(failure, for_good=for_good)

    def cancel_waits(self) -> None:
        """End the commands that wait here, for good."""
        self._memory.cancel_waits()

    async def aclose(self) -> None:
        """Close the resources that belong to the running event loop, which ends."""
        await self.store.close()

    def close(self) -> None:
        """Close the journal, after the servers."""
        if self._ownership is not None:
            self._ownership.close()

    def close_in_child(self) -> None:
        """Close the parent's descriptors in a forked child."""
        if self._ownership is not None:
            self._ownership.close_in_child()


def _batches(pairs: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield pairs of key and value in batches of at most _BATCH_KEYS and _BATCH_BYTES, or of one pair."""
    batch: list[tuple[str, bytes]] = []
    size = 0
    for key, value in pairs:
        size += len(key) + len(value)
        if batch and (size > _BATCH_BYTES or len(batch) == _BATCH_KEYS):
            yield batch
            batch, size = [], len(key) + len(value)
        batch.append((key, value))
    if batch:
        yield batch
