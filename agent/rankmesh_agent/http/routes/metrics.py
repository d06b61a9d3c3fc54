"""Metrics of the agent, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from rankmesh_agent.http.prometheus import render_metrics
from rankmesh_agent.http.routes.dependencies import BEARER, AgentStateDep
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.wire.schemas import AgentInfo
from rankmesh_agent.wire.stats import BOUNDS, AgentStats, GroupOpStats

router = APIRouter(tags=["metrics"], dependencies=[BEARER], responses=problems(503))

_STRING = {"schema": {"type": "string"}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "In the text format, or as OpenMetrics if the Accept header prefers that.",
        "content": {"text/plain": _STRING, "application/openmetrics-text": _STRING},
    }
}


@router.get("/metrics", response_class=Response, responses=_METRICS)
async def metrics(agent: AgentStateDep, request: Request) -> Response:
    """Return the counters since the agent joined its job, and the process's use of memory and time."""
    content, media_type = render_metrics(lambda: _metrics(agent.info(), agent.stats()), request.headers.get("accept"))
    return Response(content, headers={"Content-Type": media_type})


def _metrics(info: AgentInfo, stats: AgentStats) -> Iterator[Metric]:
    about = InfoMetricFamily("rankmesh_agent", "The agent, its rank (-1 for none) and job.")
    about.add_metric(
        [], {"version": info.version, "job": info.job, "rank": str(info.member.rank), "epoch": str(info.epoch)}
    )
    yield about
    yield GaugeMetricFamily("rankmesh_world_size", "Ranks in the job, 0 while the agent is in none.", info.world_size)
    yield GaugeMetricFamily("rankmesh_uptime_seconds", "Time since the agent joined its job.", info.uptime)
    yield from _operations(stats.operations)
    peers = GaugeMetricFamily("rankmesh_peers", "Connected peers by transport.", labels=["medium"])
    for medium, number in sorted(stats.peers.items()):
        peers.add_metric([medium], number)
    yield peers
    yield GaugeMetricFamily("rankmesh_peers_lost", "Peers that disconnected without leaving.", stats.lost)
    if stats.heartbeats is not None:
        pulse = stats.heartbeats
        beats = CounterMetricFamily("rankmesh_heartbeats", "Heartbeats by result.", labels=["result"])
        beats.add_metric(["answered"], pulse.answered)
        beats.add_metric(["unanswered"], pulse.unanswered)
        yield beats
        yield GaugeMetricFamily("rankmesh_heartbeat_age_seconds", "Time since the gateway last answered.", pulse.age)


def _operations(operations: list[GroupOpStats]) -> Iterator[Metric]:
    by = ["group", "op"]

    def family(
        kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, of: Callable[[GroupOpStats], float]
    ) -> Metric:
        found = kind(name, text, labels=by)
        for each in operations:
            found.add_metric([each.group, each.op], of(each))
        return found

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield family(counter, "rankmesh_operations", "Operations that have completed.", lambda o: sum(o.buckets))
    yield family(counter, "rankmesh_operation_failures", "Operations that failed.", lambda o: o.failures)
    yield family(counter, "rankmesh_operation_bytes", "Bytes of operations that have completed.", lambda o: o.nbytes)
    durations = HistogramMetricFamily("rankmesh_operation_duration_seconds", "Duration of operations.", labels=by)
    bounds = [*map(str, BOUNDS), "+Inf"]
    for each in operations:
        buckets = list(zip(bounds, map(float, accumulate(each.buckets)), strict=True))
        durations.add_metric([each.group, each.op], buckets, each.seconds)
    yield durations
    yield family(
        gauge, "rankmesh_operations_in_flight", "Operations that are queued or in flight.", lambda o: o.in_flight
    )
    yield family(
        gauge,
        "rankmesh_oldest_operation_in_flight_seconds",
        "Age of the oldest of these, 0 if none.",
        lambda o: o.oldest,
    )
