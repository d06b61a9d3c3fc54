"""The gateway's ``GET /v1/overview``: problems in it, and tables of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import FAILED, CommandError
from rankmesh._cli.tables import Table
from rankmesh_gateway.humanize import ranks, rate, seconds, size
from rankmesh_gateway.schemas import is_held_up

Overview = dict[str, Any]

_UNHEALTHY = ("suspect", "failed")
_PARTS = ("ranks", "agents", "groups", "inflight")
_AS_OF = 5
"""Place of the column in the table of groups."""


def fetch_overview(gateway: ServiceClient, job: str = "") -> Overview:
    """Return a gateway's overview.

    Args:
        gateway: client of the gateway.
        job: restrict the overview to this job, if not empty.

    Raises:
        CommandError: the gateway does not answer, or in another form.
    """
    found = gateway.get("/v1/overview")
    try:
        if job:
            for part in ("ranks", "groups", "inflight", "store"):
                found[part] = [each for each in found[part] if each["job"] == job]
        return {**found, **{part: list(found[part]) for part in _PARTS}}
    except (KeyError, TypeError):
        raise CommandError(
            f"the gateway at {gateway.url} answers in a form this command does not know: their versions differ; use "
            "the same RankMesh at both ends",
            FAILED,
        ) from None


def problems(overview: Overview) -> list[str]:
    """Return a line for each unhealthy rank, agent and group, and for each operation that is held up."""
    found = []
    for each in overview["ranks"]:
        if each["state"] in _UNHEALTHY:
            member = each["member"]
            why = each["reason"] or f"last heard {seconds(each['heartbeat_age'])} ago"
            found.append(
                f"rank {member['rank']} of job {each['job']} ({member['host']}, pid {member['pid']}) is "
                f"{each['state']}: {why}"
            )
    for each in overview["agents"]:
        if each["state"] in _UNHEALTHY:
            agent = each["agent"]
            found.append(f"agent {agent['name']} on {agent['host']} is {each['state']}")
    found += [
        f"group {each['name']} of job {each['job']}: {each['failure']}"
        for each in overview["groups"]
        if each["failure"]
    ]
    for each in overview["inflight"]:
        if each.get("held_up", is_held_up(each["age"], each["missing"])):  # gateways of earlier versions leave it out
            found.append(_held_up(each, overview))
    return found


def _held_up(call: Mapping[str, Any], overview: Overview) -> str:
    """Return the line for an operation that waits for missing ranks."""
    known = {
        each["member"]["rank"]: f" ({each['member']['host']}, pid {each['member']['pid']}, {each['state']})"
        for each in overview["ranks"]
        if (each["job"], each["epoch"]) == (call["job"], call["epoch"])
    }
    missing = call["missing"]
    if len(missing) == 1:
        culprit = f"rank {missing[0]}{known.get(missing[0], '')}"
    else:
        culprit = f"{len(missing)} ranks, {ranks(missing)}"
    return (
        f"{call['op']} #{call['seq']} in group {call['name']} of job {call['job']} has been held up for "
        f"{seconds(call['age'])} by {culprit}"
    )


def tables(overview: Overview) -> list[Table]:
    """Return the tables of an overview."""
    jobs = {each["job"]: each["epoch"] for each in overview["ranks"]}
    of_one = "".join(f" of {job}, epoch {epoch}" for job, epoch in jobs.items() if len(jobs) == 1)
    world = Table(
        f"Ranks{of_one}",
        ["job", ">rank", "host", ">pid", "state", ">heard", "agent", "reason"],
        [
            [
                each["job"],
                "?" if each["member"]["rank"] < 0 else str(each["member"]["rank"]),
                each["member"]["host"],
                str(each["member"]["pid"]),
                each["state"],
                f"{seconds(each['heartbeat_age'])} ago",
                each["member"]["http"],
                each["reason"],
            ]
            for each in overview["ranks"]
        ],
        "none; 'rankmesh run' starts some",
    )
    return [_compact(world), agents(overview), groups(overview["groups"]), inflight(overview["inflight"])]


def agents(overview: Overview) -> Table:
    """Return the standalone agents as a table."""
    return Table(
        "Agents",
        ["name", "host", ">pid", "state", ">heard", "url", "leased to"],
        [
            [
                each["agent"]["name"],
                each["agent"]["host"],
                str(each["agent"]["pid"]),
                each["state"],
                f"{seconds(each['heartbeat_age'])} ago",
                next(iter(each["agent"]["urls"]), ""),
                "; ".join(
                    f"rank {lease['rank']} of {lease['job']} ({lease['holder']})" for lease in each["agent"]["leases"]
                ),
            ]
            for each in overview["agents"]
        ],
    )


def groups(found: Iterable[Mapping[str, Any]]) -> Table:
    """Return groups as a table, with the age of the oldest report that the numbers of calls are from."""
    table = Table(
        "Groups",
        ["job", "group", "ranks", "medium", ">calls", ">as of", ">calls/s", ">bytes/s", "failure"],
        [
            [
                each["job"],
                each["name"],
                ranks(each["ranks"]),
                each["medium"],
                _span(each["seqs"].values()),
                report_age(each.get("ages", {}).values()),
                f"{each.get('operations_rate', 0.0):.1f}",
                rate(each.get("bytes_rate", 0.0)),
                each["failure"],
            ]
            for each in found
        ],
    )
    return _compact(table.without_empty_column(_AS_OF))


def report_age(ages: Iterable[float]) -> str:
    """Return the age of the oldest report; empty without one (a gateway of an earlier version has none)."""
    found = list(ages)
    return f"{seconds(max(found))} ago" if found else ""


def inflight(found: Iterable[Mapping[str, Any]]) -> Table:
    """Return the calls in flight as a table, the oldest first."""
    return Table(
        "In flight",
        ["group", ">call", "operation", ">age", ">bytes", "arrived", "missing"],
        [
            [
                each["name"],
                f"#{each['seq']}",
                each["op"],
                seconds(each["age"]),
                size(each["bytes"]),
                ranks(each["arrived"]),
                ranks(each["missing"]) or "none",
            ]
            for each in sorted(found, key=lambda each: -float(each["age"]))
        ],
    )


def summary(overview: Overview, url: str) -> str:
    """Return the first line: the gateway, and the rates of all groups."""
    gateway, rates = overview.get("gateway", {}), overview.get("rates", {})
    return (
        f"gateway {url}, RankMesh {gateway.get('version', '?')}, up {seconds(gateway.get('uptime', 0.0))}; "
        f"{rates.get('operations', 0.0):.1f} calls/s, {rate(rates.get('bytes', 0.0))}"
    )


def _span(numbers: Iterable[int]) -> str:
    """Return the members' sequence numbers: one number, or minimum and maximum."""
    found = sorted(numbers) or [0]
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


def _compact(table: Table) -> Table:
    """Return a table without an empty last column, and without the job column if all rows share a job."""
    table = table.without_empty_column()
    if len({row[0] for row in table.rows}) != 1:
        return table
    return table._replace(columns=table.columns[1:], rows=[row[1:] for row in table.rows])
