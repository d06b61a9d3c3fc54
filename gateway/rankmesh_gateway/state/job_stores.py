"""Key-value stores of the jobs: the gateway has a table for each, and serves its ranks."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from rankmesh_agent.store.table import UNLIMITED, Quota, StoreStats, Table
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import DistStoreError
from rankmesh_gateway.schemas import JobStore
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.store_backend import StoreBackend
from rankmesh_gateway.state.store_log import JOB, StoreLog

SHOWN_NAMES = 100
"""Limit of the key names of each store."""
_SETTLED_SECONDS = 60.0
"""After this long, the ranks of all live jobs have reported to a gateway that was restarted."""


class JobStores:
    """The stores of all jobs, which a backend keeps for the next gateway, if there is one. Thread-safe."""

    def __init__(
        self,
        registry: Registry,
        token: str | Credentials = "",
        quota: Quota = UNLIMITED,
        backend: StoreBackend | None = None,
    ) -> None:
        self._registry = registry
        self._credentials = Credentials.of(token)
        self._quota = quota
        self._backend = backend
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._jobs: dict[str, str] = {}
        self._started = time.monotonic()
        self._removed: set[str] = set()  # stores that the backend may still have
        for store, rows in ({} if backend is None else backend.load()).items():
            if JOB in rows:
                self._add(store, rows[JOB].decode(), rows)
            else:
                self._removed.add(store)
        self._earlier = set(self._tables)  # those of an earlier gateway

    def _add(self, store: str, job: str, rows: Mapping[bytes, bytes] | None = None) -> Table:
        table = Table(self._quota)
        if self._backend is not None:
            table.log = StoreLog(self._backend, store, job, table, rows)
        self._tables[store], self._jobs[store] = table, job
        return table

    def find(self, store: bytes) -> Table | None:
        """Return the keys and values of a store; None if no job has it, any more."""
        name = store.hex()
        with self._lock:
            table = self._tables.get(name)
            job = self._job_of(name)
            if table is not None or job is None:
                return table
            table = self._add(name, job)
        if isinstance(table.log, StoreLog):
            with contextlib.suppress(DistStoreError):  # it is written with the first change, then
                table.log.begin()
        return table

    def credentials(self, store: bytes) -> Credentials:
        """Return the credentials that the clients of a store have, or an unknown one's."""
        with self._lock:
            job = self._job_of(store.hex())
        return self._credentials if job is None else replace(self._credentials, job=job)

    def drop_unused(self) -> None:
        """Remove the stores of worlds without live ranks. Called from time to time; waits for the backend."""
        used = self._registry.stores()
        settled = time.monotonic() - self._started > _SETTLED_SECONDS
        with self._lock:
            unused = {store: job for store, job in self._jobs.items() if store not in used}
            for store, job in unused.items():
                if self._registry.has_unknown_store(job) or (store in self._earlier and not settled):
                    continue  # of a rank that this gateway has yet to hear from
                del self._jobs[store]
                table = self._tables.pop(store)
                table.close()
                table.log = None
                self._removed.add(store)
            removed, self._removed = self._removed, set()
        while removed:
            try:
                if self._backend is not None:
                    self._backend.remove(next(iter(removed)))
            except DistStoreError:
                with self._lock:
                    self._removed |= removed
                raise
            removed.pop()

    def contents(self, job: str | None = None) -> list[JobStore]:
        """Return the number of keys and the first names of the latest store of each job, or of one, by job."""
        latest: dict[str, JobStore] = {}
        for name, table in self._latest(job).items():
            latest[name] = JobStore(name, table.count(), heapq.nsmallest(SHOWN_NAMES, table.names()))
        return [latest[name] for name in sorted(latest)]

    def stats(self) -> dict[str, StoreStats]:
        """Return the counts of the latest store of each job."""
        return {name: table.stats() for name, table in self._latest().items()}

    def _latest(self, job: str | None = None) -> dict[str, Table]:
        used = self._registry.stores()
        with self._lock:
            return {
                name: self._tables[store]
                for store, name in used.items()
                if store in self._tables and job in (None, name)
            }

    def _job_of(self, store: str) -> str | None:
        return self._jobs.get(store) or self._registry.stores().get(store)
