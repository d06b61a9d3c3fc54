"""Rendering of metrics for Prometheus, at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


def render_metrics(collect: Callable[[], Iterable[Metric]], accept: str | None) -> tuple[bytes, str]:
    """Return the metrics, including those of the process, and their media type."""

    class Service(Collector):
        def collect(self) -> Iterable[Metric]:
            return collect()

    # Not the library's default registry: that belongs to the user's program, if this is its process.
    registry = CollectorRegistry()
    registry.register(Service())
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    encode, media_type = choose_encoder(accept or "")
    return encode(registry), media_type
