"""Metrics of the gateway, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from rankmesh_agent.wire.schemas import AgentState, RankState
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.http.handlers import JobQuery, Services
from rankmesh_gateway.http.replies import Reply, Request, described
from rankmesh_gateway.state.event_log import EventKind
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MAX_JOBS_SHOWN = 100
"""Limit of the jobs with metrics of their own; the others' are added up under OTHER_JOBS."""
OTHER_JOBS = "(other)"
DOCUMENT = described(
    "text/plain",
    "application/openmetrics-text",
    description="In the text format, or as OpenMetrics if the Accept header prefers that.",
)


def metrics(services: Services, query: JobQuery, request: Request) -> Reply:
    """Return the numbers of jobs, ranks, groups, agents and requests, and the process's use of memory and time.

    With `job`, those of its ranks, groups and agents alone.
    """
    from rankmesh_agent.http.prometheus import render_metrics

    content, media_type = render_metrics(
        lambda: _metrics(services.registry, services.stores, query.job), request.header("accept")
    )
    return Reply(content, {"content-type": media_type})


def _metrics(registry: Registry, stores: JobStores, job: str | None = None) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    yield InfoMetricFamily("rankmesh_gateway", "The gateway.", {"version": __version__, "id": registry.id})
    if job is None:
        yield GaugeMetricFamily("rankmesh_gateway_jobs", "Jobs with live ranks.", registry.counts().jobs)

    infos, groups = registry.ranks(job), registry.groups(job)
    kept = dict.fromkeys(info.job for info in infos)
    names = {name: name if place < MAX_JOBS_SHOWN else OTHER_JOBS for place, name in enumerate(kept)}
    states = Counter((names[info.job], info.state) for info in infos)
    ranks = GaugeMetricFamily("rankmesh_gateway_ranks", "Ranks by job and state.", labels=["job", "state"])
    ages = GaugeMetricFamily(
        "rankmesh_gateway_oldest_heartbeat_seconds", "Age of the oldest heartbeat of live ranks.", labels=["job"]
    )
    members = GaugeMetricFamily("rankmesh_gateway_groups", "Groups by job.", labels=["job"])
    failures = GaugeMetricFamily("rankmesh_gateway_groups_failed", "Groups that have failed, by job.", labels=["job"])
    for name in dict.fromkeys(names.values()):
        for state in get_args(RankState):
            ranks.add_metric([name, state], states[name, state])
        live = [each.heartbeat_age for each in infos if names[each.job] == name and each.state in ("alive", "suspect")]
        ages.add_metric([name], max(live, default=0.0))
        of_job = [each for each in groups if names.get(each.job) == name]
        members.add_metric([name], len(of_job))
        failures.add_metric([name], sum(bool(each.failure) for each in of_job))
    keys = GaugeMetricFamily("rankmesh_store_keys", "Keys with values in the job's store.", labels=["job"])
    calls = CounterMetricFamily("rankmesh_store_operations", "Calls to the job's store.", labels=["job", "op"])
    for store, stats in sorted(stores.stats().items()):
        if job in (None, store) and names.get(store) == store:
            keys.add_metric([store], stats.keys)
            for op, number in sorted(stats.operations.items()):
                calls.add_metric([store, op], number)
    about = "Share of the last 10 s that the others have waited for a rank."
    scores = GaugeMetricFamily("rankmesh_straggler_score", about, labels=["job", "rank"])
    live_infos = [each for each in infos if names[each.job] == each.job and each.state in ("alive", "suspect")]
    for (name, rank), score in {(each.job, each.member.rank): each.slow for each in live_infos}.items():
        scores.add_metric([name, str(rank)], score)
    yield from (ranks, ages, members, failures, keys, calls, scores)

    found = Counter(entry.state for entry in registry.agents.entries(job))
    agents = GaugeMetricFamily("rankmesh_gateway_agents", "Standalone agents by state.", labels=["state"])
    for state in get_args(AgentState):
        agents.add_metric([state], found[state])
    yield agents
    if job is not None:
        return

    happened = registry.events.counts()
    events = CounterMetricFamily("rankmesh_gateway_events", "Events by kind.", labels=["event"])
    for kind in get_args(EventKind):
        events.add_metric([kind], happened[kind])
    yield events
    requests = registry.request_counts()
    for what, text in (("joins", "Joins"), ("heartbeats", "Heartbeats"), ("leaves", "Leaves")):
        yield CounterMetricFamily(f"rankmesh_gateway_{what}", f"{text} of ranks with valid values.", requests[what])
