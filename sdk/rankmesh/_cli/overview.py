"""The gateway's ``GET /v1/overview``: the verdict on it, and tables of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import FAILED, NEGATIVE, CommandError
from rankmesh._cli.tables import Table
from rankmesh_gateway.diagnosis.reports import RankReport, newest_ranks
from rankmesh_gateway.diagnosis.stalls import find_failures
from rankmesh_gateway.humanize import ranks, rate, seconds, size
from rankmesh_gateway.schemas import is_held_up

Overview = dict[str, Any]
Finding = Mapping[str, Any]
"""The JSON of a Stall."""

_WAITING_SHARE = 0.2
"""Share of their time that ranks spend in the operations of a group if they wait for another one."""
_PARTS = ("ranks", "agents", "groups", "inflight")
_AS_OF = 5
"""Place of the column in the table of groups."""


def fetch_overview(gateway: ServiceClient, job: str = "") -> Overview:
    """Return a gateway's overview.

    Args:
        gateway: client of the gateway.
        job: restrict the overview to this job, if not empty.

    Raises:
        CommandError: the gateway does not answer, or in another form; or it has no such job.
    """
    found = gateway.get("/v1/overview")
    try:
        if job:
            check_job(
                gateway, job, {each["job"] for part in ("jobs", "ranks", "groups") for each in found.get(part, [])}
            )
            for part in ("ranks", "groups", "inflight", "store"):
                found[part] = [each for each in found[part] if each["job"] == job]
        return {**found, **{part: list(found[part]) for part in _PARTS}}
    except (KeyError, TypeError):
        raise CommandError(
            f"the gateway at {gateway.url} answers in a form this command does not know: their versions differ; use "
            "the same RankMesh at both ends",
            FAILED,
        ) from None


def check_job(gateway: ServiceClient, job: str, there: Collection[str]) -> None:
    """Check that a gateway has a job.

    Raises:
        CommandError: it has not; the error lists those that it has.
    """
    if job not in there:
        names = f"there are: {', '.join(sorted(there))}" if there else "it has none"
        raise CommandError(f"the gateway at {gateway.url} has no job {job!r}; {names}", NEGATIVE)


def fetch_diagnosis(gateway: ServiceClient, job: str = "", patience: float | None = None) -> dict[str, Any]:
    """Return the gateway's diagnosis: it asks the agents, so a client needs only the role ``read``.

    Args:
        gateway: client of the gateway.
        job: only this job, if not empty.
        patience: seconds in which an agent must answer; None for a recent diagnosis.

    Raises:
        CommandError: the gateway does not answer.
    """
    found: dict[str, Any] = gateway.get("/v1/diagnosis" + _query(job, patience=patience))
    return found


def fetch_snapshots(gateway: ServiceClient, job: str, patience: float, ranks: Sequence[int] = ()) -> list[Any]:
    """Return what the agents of ranks describe, in the JSON of RankDetails.

    Args:
        gateway: client of the gateway.
        job: only this job, if not empty.
        patience: seconds in which an agent must answer.
        ranks: only these, if not empty.

    Raises:
        CommandError: the gateway does not answer, has no such job, or does not show stacks to this credential.
    """
    found: list[Any] = gateway.get("/v1/ranks/snapshots" + _query(job, patience=patience, rank=ranks))
    if job and not found:
        check_job(gateway, job, {each["job"] for each in gateway.get("/v1/jobs")})
    return found


def _query(job: str, **parameters: Any) -> str:
    given = {name: value for name, value in {"job": job or None, **parameters}.items() if value is not None}
    return f"?{urlencode(given, doseq=True)}" if given else ""


class Verdict(NamedTuple):
    """The problems of jobs, the same for ``status`` and ``diagnose``.

    Attributes:
        findings: the causes: failures, then why ranks wait.
        others: a sentence for each other problem.
        remarks: a sentence for what is no problem, but slow.
    """

    findings: list[Finding]
    others: list[str]
    remarks: list[str]

    @property
    def ok(self) -> bool:
        """True if there is no problem."""
        return not self.findings and not self.others

    @property
    def sentences(self) -> list[str]:
        """The problems, the causes first."""
        several = len({each["job"] for each in self.findings}) > 1
        young = "; the wait is young, and may be a slow step"
        return [
            *(
                (f"job {each['job']}: " if several else "") + each["text"] + (young if each["young"] else "")
                for each in self.findings
            ),
            *self.others,
        ]


def judge(overview: Overview, findings: Iterable[Finding]) -> Verdict:
    """Return the verdict on an overview and the findings on its ranks; of each job, its newest epoch counts.

    Args:
        overview: the overview.
        findings: those of a diagnosis. Their failures are left out, as the overview's may be newer.
    """
    by_job: dict[str, list[RankReport]] = {}
    for report in newest_ranks(overview["ranks"], ""):
        by_job.setdefault(report.job, []).append(report)
    failures = [vars(each) for reports in by_job.values() for each in find_failures(reports)]
    found = [*failures, *(each for each in findings if each["kind"] != "failed")]
    named = {(each["job"], rank) for each in found for rank in each["ranks"]}
    failed, stuck = {each["job"] for each in failures}, {each["job"] for each in found}
    newest = {(job, reports[0].epoch) for job, reports in by_job.items()}
    others = [
        f"{report.name} of job {report.job} is suspect: no heartbeat for {seconds(report.heartbeat_age)}"
        for reports in by_job.values()
        for report in reports
        if report.state == "suspect" and (report.job, report.rank) not in named
    ]
    for each in overview["agents"]:
        if each["state"] in ("suspect", "failed"):
            agent = each["agent"]
            what = "has failed" if each["state"] == "failed" else "is suspect"
            others.append(
                f"agent {agent['name']} on {agent['host']} {what}: no heartbeat for {seconds(each['heartbeat_age'])}"
            )
    remarks: list[str] = []
    for each in overview["groups"]:
        if (each["job"], each["epoch"]) in newest and each["job"] not in failed:
            if each["failure"]:
                others.append(f"group {each['name']} of job {each['job']} has failed: {each['failure']}")
            elif each["job"] not in stuck:
                remarks += _slowest(each)
    others += [
        _held_up(each, overview)
        for each in overview["inflight"]
        if each["job"] not in stuck and each.get("held_up", is_held_up(each["age"], each["missing"]))
    ]
    return Verdict(found, others, remarks)


def _slowest(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on the member that the others wait for: it spends far less of its time in the operations."""
    shares = sorted((share, int(rank)) for rank, share in group.get("busy", {}).items())
    if len(shares) > 2 and shares[1][0] >= _WAITING_SHARE and shares[0][0] <= shares[1][0] / 2:
        (least, rank), (second, _), *_ = shares
        yield (
            f"the others wait for rank {rank}: it spends {least:.0%} of its time in the operations of group "
            f"{group['name']} of job {group['job']}, they at least {second:.0%}"
        )


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
