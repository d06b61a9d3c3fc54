"""Problems of the jobs and agents at a gateway, in words: the one list that commands and the dashboard print."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rankmesh_agent.wire.schemas import RankGroupInfo
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.stalls import find_failures
from rankmesh_gateway.humanize import ranks, seconds
from rankmesh_gateway.schemas import GroupInFlight, Problem
from rankmesh_gateway.state.registry import Registry

_WAITING_SHARE = 0.2
"""Share of their time that ranks spend in the operations of a group if they wait for another one."""
_CHECK_PROCESS = "see on {} whether process {} runs"


def find_problems(registry: Registry, findings: Sequence[Problem], job: str | None = None) -> list[Problem]:
    """Return the problems of one job or of all: failures, findings, then others; of each job, its newest epoch's.

    Args:
        registry: the registry.
        findings: those of a diagnosis. Their failures are left out, as the registry's may be newer.
        job: the job; None for all.
    """
    reports = newest_ranks(registry.ranks(job))
    failures = [each for _, of_job in groupby(reports, lambda each: each.job) for each in find_failures(list(of_job))]
    since = {each.job: time.time() - each.since for each in registry.jobs(job) if each.state == "forming"}
    found = failures + [
        replace(each, seconds=since.get(each.job, 0.0)) if each.kind == "joining" else each
        for each in findings
        if each.kind != "failed"
    ]
    failed, stuck = {each.job for each in failures}, {each.job for each in found}
    named = {(each.job, rank) for each in found for rank in each.ranks}
    newest = {(each.job, each.epoch) for each in reports}
    groups = [each for each in registry.groups(job) if (each.job, each.epoch) in newest and each.job not in failed]
    return [
        *found,
        *(_suspect(each) for each in reports if each.state == "suspect" and (each.job, each.rank) not in named),
        *_agents(registry, job),
        *(_failed_group(each) for each in groups if each.failure),
        *(_held_up(each, reports) for each in registry.in_flight(job) if each.held_up and each.job not in stuck),
        *(note for each in groups if not each.failure and each.job not in stuck for note in _busy(each)),
    ]


def _suspect(report: RankReport) -> Problem:
    silence = report.heartbeat_age
    text = f"{report.name} of job {report.job} is suspect: no heartbeat for {seconds(silence)}"
    return Problem("suspect", report.job, [report.rank], text, _CHECK_PROCESS.format(report.host, report.pid), silence)


def _agents(registry: Registry, job: str | None) -> Iterator[Problem]:
    for each in registry.agents.entries(job):
        if each.state in ("suspect", "failed"):
            agent, silence = each.agent, each.heartbeat_age
            what = "has failed" if each.state == "failed" else "is suspect"
            yield Problem(
                "agent",
                "",
                [],
                f"agent {agent.name} on {agent.host} {what}: no heartbeat for {seconds(silence)}",
                _CHECK_PROCESS.format(agent.host, agent.pid),
                silence,
                name=agent.name,
                severity="failed" if each.state == "failed" else "warning",
            )


def _failed_group(group: RankGroupInfo) -> Problem:
    text = f"group {group.name} of job {group.job} has failed: {group.failure}"
    remedy = "look at the output of its ranks: their calls in this group raise that error"
    return Problem("group", group.job, [], text, remedy, name=group.name, severity="failed")


def _held_up(call: GroupInFlight, reports: Sequence[RankReport]) -> Problem:
    """Return the problem of an operation that waits for missing ranks."""
    here = [each for each in reports if (each.job, each.epoch) == (call.job, call.epoch)]
    known = {each.rank: f" ({each.host}, pid {each.pid}, {each.state})" for each in here}
    missing = call.missing
    if len(missing) == 1:
        culprit = f"rank {missing[0]}{known.get(missing[0], '')}"
    else:
        culprit = f"{len(missing)} ranks, {ranks(missing)}"
    label = f"{call.op} #{call.seq}"
    text = f"{label} in group {call.name} of job {call.job} has been held up for {seconds(call.age)} by {culprit}"
    remedy = f"'rankmesh stacks {missing[0]}' shows where rank {missing[0]} is"
    return Problem("call", call.job, missing, text, remedy, call.age, label, call.arrived)


def _busy(group: RankGroupInfo) -> Iterator[Problem]:
    """Yield a note on the member that the others wait for: it spends far less of its time in the operations."""
    shares = sorted((share, int(rank)) for rank, share in group.busy.items())
    if len(shares) > 2 and shares[1][0] >= _WAITING_SHARE and shares[0][0] <= shares[1][0] / 2:
        (least, rank), (second, _), *_ = shares
        text = (
            f"the others wait for rank {rank}: it spends {least:.0%} of its time in the operations of group "
            f"{group.name} of job {group.job}, they at least {second:.0%}"
        )
        remedy = f"'rankmesh stacks {rank}' shows what it does meanwhile"
        yield Problem("busy", group.job, [rank], text, remedy, severity="note")
