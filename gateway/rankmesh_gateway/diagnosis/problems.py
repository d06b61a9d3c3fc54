"""Problems of the jobs and agents at a gateway, in words: the one list that commands and the dashboard print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rankmesh_agent.wire.schemas import AgentEntry, RankGroupInfo, RankInfo
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.stalls import find_failures
from rankmesh_gateway.humanize import failed_text, held_up_text, seconds, suspect_text
from rankmesh_gateway.schemas import Finding, GroupInFlight, Overview, Severity
from rankmesh_gateway.stragglers.scores import SLOW

_CHECK_PROCESS = "see on {} whether process {} runs"


def find_problems(overview: Overview, stalls: Sequence[Finding]) -> list[Finding]:
    """Return the problems in an overview: failures, stalls, then others; of each job, its newest epoch's.

    The failures among the stalls, which a diagnosis found, are left out, as the overview's ranks may be newer.
    """
    reports = newest_ranks(overview.ranks)
    failures = [each for _, of_job in groupby(reports, lambda each: each.job) for each in find_failures(list(of_job))]
    since = {each.job: overview.time - each.since for each in overview.jobs if each.state == "forming"}
    found = failures + [
        replace(each, seconds=since.get(each.job, 0.0)) if each.kind == "joining" else each
        for each in stalls
        if each.kind != "failed"
    ]
    over, stuck = {each.job for each in failures}, {each.job for each in found}
    named = {(each.job, rank) for each in found for rank in each.ranks}
    newest = {(each.job, each.epoch) for each in reports}
    groups = [each for each in overview.groups if (each.job, each.epoch) in newest and each.job not in over]
    return [
        *found,
        *(_suspect(each) for each in reports if each.state == "suspect" and (each.job, each.rank) not in named),
        *(_agent(each) for each in overview.agents if each.state in ("suspect", "failed")),
        *(_failed_group(each) for each in groups if each.failure),
        *(_held_up(each, reports) for each in overview.inflight if each.held_up and each.job not in stuck),
        *(
            _slow(each)
            for each in overview.ranks
            if each.slow >= SLOW and (each.job, each.epoch) in newest and each.job not in over | stuck
        ),
    ]


def _suspect(report: RankReport) -> Finding:
    silence = report.heartbeat_age
    text = suspect_text(f"{report.name} of job {report.job}", silence)
    return Finding("suspect", report.job, [report.rank], text, _CHECK_PROCESS.format(report.host, report.pid), silence)


def _agent(entry: AgentEntry) -> Finding:
    agent, silence, has_failed = entry.agent, entry.heartbeat_age, entry.state == "failed"
    subject = f"agent {agent.name} on {agent.host}"
    text = (
        failed_text(subject, f"no heartbeat for {seconds(silence)}") if has_failed else suspect_text(subject, silence)
    )
    remedy = _CHECK_PROCESS.format(agent.host, agent.pid)
    severity: Severity = "failed" if has_failed else "warning"
    return Finding("agent", "", [], text, remedy, silence, name=agent.name, severity=severity)


def _failed_group(group: RankGroupInfo) -> Finding:
    text = failed_text(f"group {group.name} of job {group.job}", group.failure)
    remedy = "look at the output of its ranks: their calls in this group raise that error"
    return Finding("group", group.job, [], text, remedy, name=group.name, severity="failed")


def _held_up(call: GroupInFlight, reports: Sequence[RankReport]) -> Finding:
    """Return the problem of an operation that waits for missing ranks."""
    here = [each for each in reports if (each.job, each.epoch) == (call.job, call.epoch)]
    known = {each.rank: f" ({each.host}, pid {each.pid}, {each.state})" for each in here}
    text = held_up_text(call, f"group {call.name} of job {call.job}", known)
    remedy = f"'rankmesh stacks {call.missing[0]}' shows where rank {call.missing[0]} is"
    return Finding("call", call.job, call.missing, text, remedy, call.age, f"{call.op} #{call.seq}", call.arrived)


def _slow(info: RankInfo) -> Finding:
    """Return a note on a rank that the others wait for."""
    rank = info.member.rank
    text = f"the others wait for rank {rank} of job {info.job} {info.slow:.0%} of the time"
    return Finding("busy", info.job, [rank], text, "'rankmesh stragglers' finds out why", severity="note")
