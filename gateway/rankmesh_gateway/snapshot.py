"""All that there is to see, put together once for all who watch."""

from __future__ import annotations

import json
import time

from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.clients.store_keys import StoreKeyCache
from rankmesh_gateway.schemas import GatewayInfo, Overview, TotalRates
from rankmesh_gateway.state.registry import Registry

_FRESH_SECONDS = 0.5
"""How old an overview may be that is sent to another one who watches."""


class SnapshotCache:
    """Makes overviews.

    Args:
        registry: of what.
        stores: what is in the jobs' stores.
    """

    def __init__(self, registry: Registry, stores: StoreKeyCache) -> None:
        self._registry = registry
        self._stores = stores
        self._made_at = float("-inf")
        self._made = b""

    def build(self) -> Overview:
        """Return an overview, with what is known of the stores by now."""
        registry = self._registry
        ranks, agents, groups = registry.ranks(), registry.agents.entries(), registry.groups()
        rates = TotalRates(sum(group.operations_rate for group in groups), sum(group.bytes_rate for group in groups))
        return Overview(
            time.time(),
            GatewayInfo(registry.id, __version__, registry.uptime),
            ranks,
            agents,
            groups,
            registry.in_flight(),
            rates,
            self._stores.known(),
        )

    async def refresh(self) -> Overview:
        """Return an overview with what the stores' owners say now, as far as they do so soon."""
        await self._stores.refresh()
        return self.build()

    def cached_json(self) -> bytes:
        """Return an overview of late as JSON; who watches wants to know of the stores, too."""
        self._stores.refresh_soon()
        if time.monotonic() - self._made_at > _FRESH_SECONDS:
            self._made = json.dumps(self.build(), default=vars).encode()
            self._made_at = time.monotonic()
        return self._made
