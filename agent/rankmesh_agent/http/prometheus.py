"""Metrics as Prometheus scrapes them: made when it asks, from what has been counted all along."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text"
"""The media types that a scraper may ask for."""


def render_metrics(collect: Callable[[], Iterable[Metric]], accept: str | None) -> tuple[bytes, str]:
    """Return the metrics, those of the process among them, and their media type.

    Args:
        collect: returns ours.
        accept: the request's Accept header, which says whether OpenMetrics is wanted.
    """
    # A registry of its own: the library's default one belongs to the user's program, whose process this may be.
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    encode, media_type = choose_encoder(accept or "")
    return encode(registry), media_type


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: who registers here has no names to be checked against."""
        return []
