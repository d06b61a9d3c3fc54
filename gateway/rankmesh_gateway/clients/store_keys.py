"""Contents of the jobs' stores, requested from the agents that own them while a client watches."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rankmesh_gateway.clients.agent_client import AgentClient
from rankmesh_gateway.schemas import JobStore
from rankmesh_gateway.state.registry import Registry

SHOWN_NAMES = 100
"""Limit of the key names of each store."""
_EVERY_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_MAX_STORES = 16
"""Limit of the stores that are requested."""


class StoreKeyCache:
    """Last known contents of the jobs' stores. For the server's event loop.

    Args:
        registry: the registry, which knows the owners.
        agents: sends the requests.
    """

    def __init__(self, registry: Registry, agents: AgentClient) -> None:
        self._registry = registry
        self._agents = agents
        self._known: dict[str, JobStore] = {}
        self._refreshed_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def known(self) -> list[JobStore]:
        """Return the known contents, by job."""
        return [self._known[job] for job in sorted(self._known)]

    def refresh_soon(self) -> None:
        """Begin to refresh the contents, unless that was recently."""
        if time.monotonic() - self._refreshed_at >= _EVERY_SECONDS and (
            self._refreshing is None or self._refreshing.done()
        ):
            self._refreshed_at = time.monotonic()
            self._refreshing = asyncio.ensure_future(self._fetch())

    async def refresh(self) -> None:
        """Refresh the contents, unless that was recently; return after _ANSWER_SECONDS if no answer has come."""
        self.refresh_soon()
        if self._refreshing is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._refreshing), _ANSWER_SECONDS)

    async def _fetch(self) -> None:
        running = [info for info in self._registry.ranks() if info.state in ("alive", "suspect")]
        running.sort(key=lambda info: info.member.rank, reverse=True)
        first_ranks = {info.job: info.member.http for info in running}  # they own the stores, or forward to the owner
        selected = list(first_ranks.items())[:_MAX_STORES]
        found = await asyncio.gather(*(self._fetch_one(job, url) for job, url in selected))
        self._known = {store.job: store for store in found if store is not None}

    async def _fetch_one(self, job: str, url: str) -> JobStore | None:
        """Return a store's contents; the last known ones, or None, if its owner does not answer."""
        counting = self._agents.request("POST", f"{url}/v1/store/count", job=job, seconds=_ANSWER_SECONDS)
        listing = self._agents.request("GET", f"{url}/v1/store?limit={SHOWN_NAMES}", job=job, seconds=_ANSWER_SECONDS)
        count, names = await asyncio.gather(counting, listing)
        match count.document, names.document:
            case {"value": int(keys)}, list(found):
                return JobStore(job, keys, [str(name) for name in found[:SHOWN_NAMES]])
        return self._known.get(job)
