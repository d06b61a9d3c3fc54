"""The gateway's metrics, as the library that Prometheus' users have reads them."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from rankmesh_agent.wire.schemas import GroupInfo
from rankmesh_gateway.http.routes.metrics import MAX_JOBS_SHOWN, OTHER_JOBS

pytestmark = pytest.mark.anyio


async def samples(direct, accept=None):
    answer = await direct.get("/metrics", headers={} if accept is None else {"Accept": accept})
    assert answer.status_code == 200
    families = (read_text if accept is None else read_openmetrics)(answer.text)
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text; version=1.0.0"], ids=["text", "openmetrics"])
async def test_it_counts_jobs_ranks_and_what_was_asked(direct, registry, ask, accept):
    for rank in range(2):
        registry.join(ask.join(rank, 2))
    registry.join(ask.join(0, 3, job="another"))
    registry.heartbeat(ask.heartbeat(0, 2))
    found = await samples(direct, accept)
    assert found["rankmesh_gateway_jobs",] == 2
    assert found["rankmesh_gateway_ranks", "alive", "job"] == 2
    assert found["rankmesh_gateway_ranks", "another", "joining"] == 1
    assert found["rankmesh_gateway_ranks", "failed", "job"] == 0
    assert found["rankmesh_gateway_groups", "job"] == 0
    assert found["rankmesh_gateway_agents", "free"] == 0
    assert found["rankmesh_gateway_joins_total",] == 3
    assert found["rankmesh_gateway_events_total", "world-complete"] == 1
    assert found["rankmesh_gateway_events_total", "rank-failed"] == 0
    assert found["rankmesh_gateway_heartbeats_total",] == 1
    assert found["rankmesh_gateway_leaves_total",] == 0
    assert found["process_resident_memory_bytes",] > 1e6


async def test_the_oldest_heartbeat_tells_who_is_about_to_be_missed(direct, registry, ask, clock):
    for rank in range(2):
        registry.join(ask.join(rank, 2))
    clock.now += 2
    registry.heartbeat(ask.heartbeat(0, 2))
    clock.now += 0.5
    assert (await samples(direct))["rankmesh_gateway_oldest_heartbeat_seconds", "job"] == 2.5


async def test_the_score_of_each_rank(direct, registry, ask, clock):
    for rank in range(2):
        registry.join(ask.join(rank, 2))
    for second in range(10):
        for rank in range(2):
            body = ask.heartbeat(rank, 2)
            spent = 0.4 * second * (1 - rank)
            body.groups = [GroupInfo("aa", "world", [0, 1], 10 * second, "shm", "", "", seconds=spent)]
            registry.heartbeat(body)
        registry.poll_timeouts()
        clock.now += 1
    found = await samples(direct)
    assert found["rankmesh_straggler_score", "0", "job"] == 0
    assert found["rankmesh_straggler_score", "1", "job"] == pytest.approx(0.4)


async def test_many_jobs_are_counted_together(direct, registry, ask):
    for number in range(MAX_JOBS_SHOWN + 5):
        registry.join(ask.join(0, 2, job=f"job {number:03}"))
    found = await samples(direct)
    assert found["rankmesh_gateway_ranks", OTHER_JOBS, "joining"] == 5
    assert found["rankmesh_gateway_ranks", "job 099", "joining"] == 1
    assert len({key for key in found if key[0] == "rankmesh_gateway_groups"}) == MAX_JOBS_SHOWN + 1
