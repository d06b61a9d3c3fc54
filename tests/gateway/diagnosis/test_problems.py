"""The problems that the gateway lists, for commands and the dashboard: which, in which words and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support import overview

from rankmesh_agent.wire import json_text
from rankmesh_gateway.diagnosis.problems import find_problems
from rankmesh_gateway.schemas import Finding, Overview

HELD_UP = "all_reduce(sum, float32 x 1024) #103 in group world of job job has been held up for 16.0 s"
FAILED = {"state": "failed", "reason": "killed"}
WAITS = {"age": 16.0, "held_up": True}


def parts(ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
    return {
        "ranks": [overview.rank(each) for each in range(ranks)],
        "agents": [overview.agent("agent-7")],
        "groups": [overview.group(ranks=ranks)],
        "inflight": [overview.inflight(2.5, arrived=[0], missing=[1])],
        "jobs": [],
    }


def problems(made: dict[str, list[dict[str, Any]]], findings: Sequence[dict[str, Any]] = ()) -> list[Finding]:
    gateway = {"id": "g", "version": "1", "uptime": 1.0}
    rest = {"time": 1e9, "gateway": gateway, "rates": {"operations": 0.0, "bytes": 0.0}, "store": []}
    return find_problems(json_text.convert(Overview, {**rest, **made}), json_text.convert(list[Finding], findings))


def test_all_is_well():
    made = parts()
    assert problems(made) == []
    for call in ({"age": 16.0, "missing": []}, {"age": 9.0, "held_up": False}):
        made["inflight"][0].update(call)
        assert problems(made) == []


@pytest.mark.parametrize(
    ("part", "change", "kind", "severity", "text"),
    [
        ("ranks", FAILED, "failed", "failed", "rank 1 (host-0, pid 4001) has failed: killed"),
        (
            "ranks",
            {"state": "suspect", "heartbeat_age": 4.2},
            "suspect",
            "warning",
            "rank 1 (host-0, pid 4001) of job job is suspect: no heartbeat for 4.2 s",
        ),
        (
            "agents",
            {"state": "failed"},
            "agent",
            "failed",
            "agent agent-7 on agent-7.local has failed: no heartbeat for 200 ms",
        ),
        ("groups", {"failure": "rank 1"}, "group", "failed", "group world of job job has failed: rank 1"),
        ("inflight", WAITS, "call", "warning", f"{HELD_UP} by rank 1 (host-0, pid 4001, alive)"),
        ("inflight", {**WAITS, "missing": [1, 2, 3]}, "call", "warning", f"{HELD_UP} by 3 ranks, 1-3"),
    ],
)
def test_a_problem(part: str, change: dict[str, Any], kind: str, severity: str, text: str):
    made = parts()
    made[part][-1].update(change)
    (found,) = problems(made)
    assert (found.kind, found.severity, found.text) == (kind, severity, text)
    assert found.remedy
    assert found.seconds == made[part][-1].get("heartbeat_age", made[part][-1].get("age", 0.0))


def test_the_cause_of_a_failure_comes_first():
    made = parts(4)
    blames = (("rank 2 failed", [2], 4.0), ("rank 2 failed", [2, 3], 3.0), ("ValueError: no more data", [], 3.5))
    for rank, (reason, blamed, age) in zip(made["ranks"], blames, strict=False):
        rank.update(state="failed", reason=reason, failed_ranks=blamed, heartbeat_age=age)
    made["groups"][0]["failure"] = "rank 2 failed"
    (found,) = problems(made)
    assert (
        found.text == "rank 2 (host-0, pid 4002) has failed: ValueError: no more data; ranks 0-1 failed because of it"
    )
    assert (found.kind, found.ranks) == ("failed", [2])


def test_a_finding_is_the_only_problem():
    """The operation that is held up, and the ranks that it names, are the same."""
    made = parts(3)
    made["ranks"][2].update(state="suspect", heartbeat_age=4.0)
    made["inflight"][0].update(WAITS)
    made["ranks"][2]["slow"] = 0.9
    old = overview.finding("rank 2 failed, as the registry does not know any more", kind="failed")
    (found,) = problems(made, [overview.finding("rank 2 has not come"), old])
    assert (found.text, found.kind, found.ranks) == ("rank 2 has not come", "elsewhere", [2])


def test_only_the_newest_epoch_counts():
    made = parts()
    made["ranks"] += [overview.rank(each, epoch=2) for each in range(2)]
    made["ranks"][0].update(FAILED)
    made["groups"][0]["failure"] = "rank 0 failed"
    assert problems(made) == []


def test_a_rank_that_the_others_wait_for_is_a_note():
    made = parts(4)
    made["ranks"][2]["slow"] = 0.87
    made["ranks"][1]["slow"] = 0.02
    (found,) = problems(made)
    assert (found.severity, found.ranks) == ("note", [2])
    assert found.text == "the others wait for rank 2 of job job 87% of the time"


def test_a_world_that_forms_has_the_time_since_its_first_rank():
    made = parts()
    made["jobs"] = [{"job": "job", "epoch": 1, "state": "forming", "world_size": 4, "ranks": {}, "since": 1e9 - 50}]
    (found,) = problems(made, [overview.finding("job waits", kind="joining", ranks=[0])])
    assert found.seconds == 50
