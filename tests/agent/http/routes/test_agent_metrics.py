"""The agent's metrics, as the library that Prometheus' users have reads them."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from rankmesh_agent.wire.stats import BOUNDS, AgentStats

pytestmark = pytest.mark.anyio

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def samples(client, accept: str | None = None) -> dict:
    answer = await client.get("/metrics", headers={} if accept is None else {"Accept": accept})
    assert answer.status_code == 200
    kind = answer.headers["content-type"]
    assert kind.startswith("text/plain" if accept is None else "application/openmetrics-text")
    families = (read_text if accept is None else read_openmetrics)(answer.text)
    return {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}


@pytest.mark.parametrize("accept", [None, OPENMETRICS], ids=["text", "openmetrics"])
async def test_it_shows_what_has_been_counted(client, accept):
    found = await samples(client, accept)
    reduced = (("group", "world"), ("op", "all_reduce"))
    assert found["rankmesh_operations_total", *reduced] == 3
    assert found["rankmesh_operation_failures_total", *reduced] == 1
    assert found["rankmesh_operation_bytes_total", *reduced] == 4096
    assert found["rankmesh_operations_in_flight", *reduced] == 2
    assert found["rankmesh_oldest_operation_in_flight_seconds", *reduced] == 0.5
    assert found["rankmesh_operation_duration_seconds_sum", *reduced] == 1.25
    assert found["rankmesh_operation_duration_seconds_count", *reduced] == 3
    assert found["rankmesh_heartbeats_total", ("result", "answered")] == 7
    assert found["rankmesh_heartbeats_total", ("result", "unanswered")] == 1
    assert found["rankmesh_heartbeat_age_seconds",] == 0.25
    assert found["rankmesh_peers", ("medium", "segment")] == 2
    assert found["rankmesh_peers_lost",] == 1
    assert found["rankmesh_world_size",] == 4
    assert found["rankmesh_agent_info", ("epoch", "1"), ("job", "job"), ("rank", "1"), ("version", "0.1.0")] == 1
    assert found["process_resident_memory_bytes",] > 1e6


async def test_buckets_are_cumulative(client):
    found = await samples(client)
    buckets = {
        float(labels["le"]): value
        for (name, *pairs), value in found.items()
        if name == "rankmesh_operation_duration_seconds_bucket" and (labels := dict(pairs))["op"] == "all_reduce"
    }
    assert list(buckets) == [*BOUNDS, float("inf")]
    assert [*buckets.values()] == [0, 2, *[3] * 14]


async def test_names_are_written_so_that_they_can_be_read(client):
    assert (await samples(client))["rankmesh_operations_total", ("group", 'odd "name"\\n'), ("op", "send")] == 1


async def test_an_agent_in_no_job_has_metrics_too(client, agent):
    agent.stats = AgentStats
    found = await samples(client)
    assert found["process_cpu_seconds_total",] > 0
    assert not any(name.startswith(("rankmesh_operation", "rankmesh_heart")) for name, *_ in found)
