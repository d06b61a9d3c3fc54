"""The gateway's overview as tables, and its problems as sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import FAILED, NEGATIVE, CommandError
from rankmesh._cli.tables import Table
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.humanize import ranks, rate, seconds, size
from rankmesh_gateway.schemas import StragglerReport
from rankmesh_gateway.stragglers.scores import SLOW

Overview = dict[str, Any]
Finding = Mapping[str, Any]
"""The JSON of a Finding."""

_OTHERS = frozenset({"suspect", "agent", "group", "call"})
"""Kinds of problems that the gateway knows without asking agents."""
_PARTS = ("ranks", "agents", "groups", "inflight", "problems")
_UPDATED, _SLOW, _PROCESS = 5, 6, 8
"""Places of the columns in the tables of groups and of ranks."""


def fetch_overview(gateway: ServiceClient, job: str = "") -> Overview:
    """Return a gateway's overview, of all jobs or one; CommandError without an answer, or such a job."""
    found = gateway.get("/v1/overview")
    try:
        if job:
            check_job(
                gateway, job, {each["job"] for part in ("jobs", "ranks", "groups") for each in found.get(part, [])}
            )
            for part in ("ranks", "groups", "inflight", "store", "problems"):
                found[part] = [each for each in found[part] if each["job"] == job]
        return {**found, **{part: list(found[part]) for part in _PARTS}}
    except (KeyError, TypeError):
        raise _other_version(gateway) from None


def _other_version(gateway: ServiceClient) -> CommandError:
    return CommandError(
        f"the gateway at {gateway.url} answers in a form this command does not know: their versions differ; use the "
        "same RankMesh at both ends",
        FAILED,
    )


def check_job(gateway: ServiceClient, job: str, there: Collection[str]) -> None:
    """Raise CommandError, with the jobs that there are, unless a gateway has a job."""
    if job not in there:
        names = f"there are: {', '.join(sorted(there))}" if there else "it has none"
        raise CommandError(f"the gateway at {gateway.url} has no job {job!r}; {names}", NEGATIVE)


def fetch_diagnosis(gateway: ServiceClient, job: str = "", patience: float | None = None) -> dict[str, Any]:
    """Return the gateway's diagnosis; ``patience``: seconds in which an agent must answer, None: a recent one."""
    found: dict[str, Any] = gateway.get("/v1/diagnosis" + _query(job, patience=patience))
    if "problems" not in found:
        raise _other_version(gateway)
    return found


def fetch_snapshots(
    gateway: ServiceClient, job: str, patience: float, ranks: Sequence[int] = (), *, records: bool = False
) -> list[Any]:
    """Return what the agents of some ranks, or all, describe (RankDetails); ``records``: with the earlier calls."""
    found: list[Any] = gateway.get(
        "/v1/ranks/snapshots" + _query(job, patience=patience, rank=ranks, records="true" if records else None)
    )
    if job and not found:
        check_job(gateway, job, {each["job"] for each in gateway.get("/v1/jobs")})
    return found


def fetch_stragglers(gateway: ServiceClient, job: str, seconds: float, patience: float) -> StragglerReport:
    """Return which ranks make the others wait, by the calls of the last seconds."""
    query = _query(job, seconds=seconds, patience=patience, links="true")
    found = json_text.convert(StragglerReport, gateway.get(f"/v1/stragglers{query}"))
    if job and not (found.stragglers or found.silent):
        check_job(gateway, job, {each["job"] for each in gateway.get("/v1/jobs")})
    return found


def _query(job: str, **parameters: Any) -> str:
    given = {name: value for name, value in {"job": job or None, **parameters}.items() if value is not None}
    return f"?{urlencode(given, doseq=True)}" if given else ""


class Verdict:
    """The problems of jobs and agents as the gateway lists them, for ``status`` and ``diagnose``.

    Attributes:
        problems: in the JSON of Finding, but for notes; ``findings``: those of them that a diagnosis finds.
        remarks: the sentences of the notes, on what is no problem, but slow.
    """

    def __init__(self, problems: Sequence[Finding], jobs: Iterable[str]) -> None:
        self.problems = [each for each in problems if each["severity"] != "note"]
        self.findings = [each for each in self.problems if each["kind"] not in _OTHERS]
        self.remarks = [str(each["text"]) for each in problems if each["severity"] == "note"]
        self.ok = not self.problems
        self._several = len(set(jobs)) > 1

    def sentence(self, problem: Finding) -> str:
        """Return a problem in words, with its job where there are several."""
        job = f"job {problem['job']}"
        return problem["text"] if not self._several or job in problem["text"] else f"{job}: {problem['text']}"

    @property
    def others(self) -> list[str]:
        """A sentence for each problem that is no finding."""
        return [each["text"] for each in self.problems if each["kind"] in _OTHERS]

    @property
    def sentences(self) -> list[str]:
        """The problems, the causes first."""
        young = "; the wait is young, and may be a slow step"
        return [self.sentence(each) + (young if each["young"] else "") for each in self.problems]


def fetch_status(gateway: ServiceClient, job: str = "") -> tuple[Overview, Verdict]:
    """Return a gateway's overview and its problems; see ``fetch_overview``."""
    overview = fetch_overview(gateway, job)
    return overview, Verdict(fetch_diagnosis(gateway, job)["problems"], (each["job"] for each in overview["ranks"]))


def head(overview: Overview, verdict: Verdict, url: str) -> Table:
    """Return the gateway and its rates in a line, and the problems."""
    gateway, rates = overview.get("gateway", {}), overview.get("rates", {})
    title = (
        f"gateway {url}, RankMesh {gateway.get('version', '?')}, up {seconds(gateway.get('uptime', 0.0))}; "
        f"{rates.get('operations', 0.0):.1f} operations/s, {rate(rates.get('bytes', 0.0))}"
    )
    return Table(title, [], [], "\n  ".join(map(printable, verdict.sentences + verdict.remarks)) or "all is well")


def tables(overview: Overview) -> list[Table]:
    """Return the tables of an overview."""
    jobs = {each["job"]: each["epoch"] for each in overview["ranks"]}
    of_one = "".join(f" of {job}, epoch {epoch}" for job, epoch in jobs.items() if len(jobs) == 1)
    world = Table(
        f"Ranks{of_one}",
        ["job", ">rank", "host", ">pid", "state", ">last heartbeat", ">slow", "agent", "process", "reason"],
        [
            [
                each["job"],
                "?" if each["member"]["rank"] < 0 else str(each["member"]["rank"]),
                each["member"]["host"],
                str(each["member"]["pid"]),
                each["state"],
                f"{seconds(each['heartbeat_age'])} ago",
                f"{each['slow']:.0%}" if each.get("slow", 0.0) >= SLOW else "",
                each["member"]["http"],
                process_text(each),
                each["reason"],
            ]
            for each in overview["ranks"]
        ],
        "none; 'rankmesh run' starts some",
    ).without_empty_column(_PROCESS)
    others = _agent_table(overview["agents"]), group_table(overview["groups"]), inflight_table(overview["inflight"])
    return [compact(world.without_empty_column(_SLOW)), *others]


def process_text(rank: Mapping[str, Any]) -> str:
    """Return state, CPU use and memory of the process of an observed rank; empty for others."""
    usage = rank.get("usage")
    if not usage or not rank["member"].get("observed"):
        return ""
    return f"{usage['state']}, {usage['cpu']:.0%} of a core, {usage['memory'] >> 20} MiB"


def _agent_table(agents: Iterable[Mapping[str, Any]]) -> Table:
    return Table(
        "Agents",
        ["name", "host", ">pid", "state", ">last heartbeat", "url", "leased to"],
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
            for each in agents
        ],
    )


def group_table(found: Iterable[Mapping[str, Any]]) -> Table:
    """Return groups as a table, with the age of the oldest report that the numbers of calls are from."""
    table = Table(
        "Groups",
        ["job", "group", "ranks", "medium", ">operations", ">updated", ">operations/s", ">bytes/s", "failure"],
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
    return compact(table.without_empty_column(_UPDATED))


def report_age(ages: Iterable[float]) -> str:
    """Return the age of the oldest report; empty without one (a gateway of an earlier version has none)."""
    found = list(ages)
    return f"{seconds(max(found))} ago" if found else ""


def inflight_table(found: Iterable[Mapping[str, Any]]) -> Table:
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


def _span(numbers: Iterable[int]) -> str:
    """Return the members' sequence numbers: one number, or minimum and maximum."""
    found = sorted(numbers) or [0]
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


def compact(table: Table) -> Table:
    """Return a table without an empty last column, and without the job column if all rows share a job."""
    table = table.without_empty_column()
    if len({row[0] for row in table.rows}) != 1:
        return table
    return table._replace(columns=table.columns[1:], rows=[row[1:] for row in table.rows])
