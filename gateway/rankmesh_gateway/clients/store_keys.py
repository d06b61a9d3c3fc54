"""What is in the jobs' stores, asked of the agents that own them while somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rankmesh_gateway.clients.agent_client import AgentClient
from rankmesh_gateway.schemas import JobStore
from rankmesh_gateway.state.registry import Registry

SHOWN_NAMES = 100
"""How many names of keys are shown of each store."""
_EVERY_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_MAX_STORES = 16
"""How many jobs' stores are asked."""


class StoreKeyCache:
    """The jobs' stores, as their owners said of late. For the event loop that serves.

    Args:
        registry: knows who the owners are.
        members: asks them.
    """

    def __init__(self, registry: Registry, members: AgentClient) -> None:
        self._registry = registry
        self._members = members
        self._known: dict[str, JobStore] = {}
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def known(self) -> list[JobStore]:
        """Return what is known of the stores, by job."""
        return [self._known[job] for job in sorted(self._known)]

    def refresh_soon(self) -> None:
        """Ask again, unless that was of late; nobody waits for it."""
        if time.monotonic() - self._asked_at >= _EVERY_SECONDS and (self._asking is None or self._asking.done()):
            self._asked_at = time.monotonic()
            self._asking = asyncio.ensure_future(self._fetch())

    async def refresh(self) -> None:
        """Ask again, unless that was of late; return with the answers, or without them after a while."""
        self.refresh_soon()
        if self._asking is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._asking), _ANSWER_SECONDS)

    async def _fetch(self) -> None:
        owners = {
            info.job: info.member.http
            for info in self._registry.ranks()
            if info.member.rank == 0 and info.state in ("alive", "suspect")
        }
        asked = list(owners.items())[:_MAX_STORES]
        found = await asyncio.gather(*(self._fetch_one(job, url) for job, url in asked))
        self._known = {store.job: store for store in found if store is not None}

    async def _fetch_one(self, job: str, url: str) -> JobStore | None:
        """Return what is in a store, what was known of it when its owner does not answer, None if that is nothing."""
        counting = self._members.request("POST", f"{url}/v1/store/count", seconds=_ANSWER_SECONDS)
        listing = self._members.request("GET", f"{url}/v1/store?limit={SHOWN_NAMES}", seconds=_ANSWER_SECONDS)
        count, names = await asyncio.gather(counting, listing)
        match count.document, names.document:
            case {"value": int(keys)}, list(found):
                return JobStore(job, keys, [str(name) for name in found[:SHOWN_NAMES]])
        return self._known.get(job)
