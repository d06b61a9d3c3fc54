"""What the gateway sees, as ``GET /v1/overview`` says it: whether all is well, and tables of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankmesh._cli.client import Service
from rankmesh._cli.exit_codes import FAILED, CommandError
from rankmesh._cli.humanize import ranks, rate, seconds, size
from rankmesh._cli.tables import Table

Overview = dict[str, Any]

_ILL = ("suspect", "failed")
_PARTS = ("ranks", "agents", "groups", "inflight")


def overview_of(gateway: Service, job: str = "") -> Overview:
    """Ask a gateway.

    Args:
        gateway: whom.
        job: leave out the other jobs, if not empty.

    Raises:
        CommandError: it does not answer, or not so.
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


def complaints(overview: Overview) -> list[str]:
    """Return what is not as it should be, each in a sentence."""
    found = []
    for each in overview["ranks"]:
        if each["state"] in _ILL:
            member = each["member"]
            why = each["reason"] or f"last heard {seconds(each['heartbeat_age'])} ago"
            found.append(
                f"rank {member['rank']} of job {each['job']} ({member['host']}, pid {member['pid']}) is "
                f"{each['state']}: {why}"
            )
    for each in overview["agents"]:
        if each["state"] in _ILL:
            agent = each["agent"]
            found.append(f"agent {agent['name']} on {agent['host']} is {each['state']}")
    found += [
        f"group {each['name']} of job {each['job']}: {each['failure']}"
        for each in overview["groups"]
        if each["failure"]
    ]
    return found


def tables(overview: Overview) -> list[Table]:
    """Return everything as tables."""
    jobs = {each["job"]: each["epoch"] for each in overview["ranks"]}
    world = Table(
        _title("Ranks", jobs),
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
    return [_without_empty_columns(world), agents(overview), groups(overview["groups"]), inflight(overview["inflight"])]


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
    """Return groups as a table."""
    table = Table(
        "Groups",
        ["job", "group", "ranks", "medium", ">calls", ">calls/s", ">bytes/s", "failure"],
        [
            [
                each["job"],
                each["name"],
                ranks(each["ranks"]),
                each["medium"],
                _span(each["seqs"].values()),
                f"{each.get('operations_rate', 0.0):.1f}",
                rate(each.get("bytes_rate", 0.0)),
                each["failure"],
            ]
            for each in found
        ],
    )
    return _without_empty_columns(table)


def inflight(found: Iterable[Mapping[str, Any]]) -> Table:
    """Return the calls under way as a table, the oldest first."""
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
    """Return the first line: which gateway, and how much goes on."""
    gateway, rates = overview.get("gateway", {}), overview.get("rates", {})
    return (
        f"gateway {url}, RankMesh {gateway.get('version', '?')}, up {seconds(gateway.get('uptime', 0.0))}; "
        f"{rates.get('operations', 0.0):.1f} calls/s, {rate(rates.get('bytes', 0.0))}"
    )


def _title(title: str, jobs: Mapping[str, int]) -> str:
    return title if len(jobs) != 1 else f"{title} of {next(iter(jobs))}, epoch {next(iter(jobs.values()))}"


def _span(numbers: Iterable[int]) -> str:
    """Return how many calls the members have begun: one number, or the least and the most."""
    found = sorted(numbers)
    if not found:
        return "0"
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


def _without_empty_columns(table: Table) -> Table:
    """Return a table without a last column that says nothing, and without a job's name that is in the title."""
    columns, rows = list(table.columns), [list(row) for row in table.rows]
    if rows and not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    if rows and len({row[0] for row in rows}) == 1 and columns[0] == "job":
        columns, rows = columns[1:], [row[1:] for row in rows]
    return table._replace(columns=columns, rows=rows)
