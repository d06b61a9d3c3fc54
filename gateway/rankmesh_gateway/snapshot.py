"""Snapshot of the whole gateway, created once for all clients that watch."""

from __future__ import annotations

import json
import time

from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.clients.store_keys import StoreKeyCache
from rankmesh_gateway.diagnosis.service import DiagnosisService
from rankmesh_gateway.schemas import GatewayInfo, Overview
from rankmesh_gateway.state.history import total_rates
from rankmesh_gateway.state.registry import Registry

_MAX_AGE_SECONDS = 0.5
"""Age up to which a cached snapshot is sent to another client."""


class SnapshotCache:
    """Creates snapshots, and keeps the last one.

    Args:
        registry: the registry.
        stores: the contents of the jobs' stores.
        diagnosis: the findings on the jobs, which are refreshed while clients watch.
    """

    def __init__(self, registry: Registry, stores: StoreKeyCache, diagnosis: DiagnosisService) -> None:
        self._registry = registry
        self._stores = stores
        self._diagnosis = diagnosis
        self._created_at = float("-inf")
        self._json = b""

    def build(self) -> Overview:
        """Return a snapshot, with the stores' contents as far as they are known."""
        registry = self._registry
        ranks, agents, groups = registry.ranks(), registry.agents.entries(), registry.groups()
        return Overview(
            time.time(),
            GatewayInfo(registry.id, __version__, registry.uptime),
            ranks,
            agents,
            groups,
            registry.in_flight(),
            total_rates(groups),
            self._stores.known(),
            self._diagnosis.known(),
            registry.jobs(),
        )

    async def refresh(self) -> Overview:
        """Return a snapshot with the stores' contents as of now, of those whose owners answer soon."""
        await self._stores.refresh()
        return self.build()

    def cached_json(self) -> bytes:
        """Return a recent snapshot as JSON, and have the stores and findings refreshed for a later one."""
        self._stores.refresh_soon()
        self._diagnosis.refresh_soon()
        if self._registry.closed or time.monotonic() - self._created_at > _MAX_AGE_SECONDS:
            self._json = json.dumps(self.build(), default=vars).encode()
            self._created_at = time.monotonic()
        return self._json
