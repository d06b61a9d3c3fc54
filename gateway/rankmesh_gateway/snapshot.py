"""Snapshot of the whole gateway, created once for all clients that watch."""

from __future__ import annotations

import time

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.diagnosis.problems import find_problems
from rankmesh_gateway.diagnosis.service import DiagnosisService
from rankmesh_gateway.schemas import Finding, GatewayInfo, Overview
from rankmesh_gateway.state.history import total_rates
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

_MAX_AGE_SECONDS = 0.5
"""Age up to which a cached snapshot is sent to another client."""


_MAX_CACHED = 64
"""Limit of the jobs whose snapshots are kept."""


class SnapshotCache:
    """Creates snapshots, and keeps the last one of each job."""

    def __init__(self, registry: Registry, stores: JobStores, diagnosis: DiagnosisService) -> None:
        self._registry = registry
        self._stores = stores
        self._diagnosis = diagnosis
        self._cached: dict[str | None, tuple[float, bytes]] = {}
        """By job, None for all, when the snapshot was created, and the snapshot."""

    def build(self, job: str | None = None, found: list[Finding] | None = None) -> Overview:
        """Return a snapshot of one job or of all, with these problems that a diagnosis found, or the last one's."""
        registry = self._registry
        ranks, agents, groups = registry.ranks(job), registry.agents.entries(job), registry.groups(job)
        known = [each for each in self._diagnosis.known() if job in (None, each.job)]
        overview = Overview(
            time.time(),
            GatewayInfo(registry.id, __version__, registry.uptime),
            ranks,
            agents,
            groups,
            registry.in_flight(job),
            total_rates(groups),
            self._stores.contents(job),
            registry.jobs(job),
        )
        overview.problems = find_problems(overview, known if found is None else found)
        return overview

    def cached_json(self, job: str | None = None) -> bytes:
        """Return a recent snapshot as JSON, and have the diagnosis made again for a later one."""
        self._diagnosis.refresh_soon()
        created_at, content = self._cached.get(job, (float("-inf"), b""))
        if self._registry.closed or time.monotonic() - created_at > _MAX_AGE_SECONDS:
            content = json_text.encode(self.build(job))
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[job] = time.monotonic(), content
        return content
