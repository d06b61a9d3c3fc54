"""``rankmesh status``: ranks, agents, groups, and the calls in flight; with ``--groups``, groups alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import NEGATIVE, OK, USAGE, CommandError, command, write_json
from rankmesh._cli.options import GatewayOption, JobOption, JsonOption, TokenFileOption
from rankmesh._cli.overview import (
    Overview,
    fetch_overview,
    fetch_status,
    group_table,
    head,
    inflight_table,
    report_age,
    tables,
)
from rankmesh._cli.tables import Table, show
from rankmesh._cli.top import live

_LEAST_INTERVAL = 0.1


@command
def status(
    group: Annotated[
        str, typer.Argument(metavar="GROUP", help="Only this group, by its name or id: each of its ranks.")
    ] = "",
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; the default if output is no terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=_LEAST_INTERVAL, help="Refresh interval in seconds.")
    ] = 1.0,
    groups: Annotated[bool, typer.Option("--groups", help="Print the groups only, once.")] = False,
    json: JsonOption = False,
) -> int:
    """Show ranks, hosts, groups, rates and operations in flight; on a terminal, refresh them until q or Ctrl-C.

    On a terminal the ranks have their use of processor and memory, keys sort them, and Enter shows the stack of one.

    Exit code 0: all is well; 1: there is a problem, as in 'rankmesh diagnose'; 3: no gateway answers. With GROUP, 1: it
    does not exist, or has failed.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        if groups or group:
            return _groups(fetch_overview(service, job), group, json=json)
        overview, verdict = fetch_status(service, job)
        if json:
            found = {"ok": verdict.ok, "complaints": verdict.sentences, "remarks": verdict.remarks, "url": service.url}
            write_json({**found, **overview, "findings": verdict.findings, "problems": verdict.problems})
        elif once or not sys.stdout.isatty():
            show([head(overview, verdict, service.url), *tables(overview)])
        else:
            verdict = live(service, job, (overview, verdict), interval)
    return OK if verdict.ok else NEGATIVE


def _groups(overview: Overview, name: str, *, json: bool) -> int:
    """Print all groups, or one: the last operation of each rank, and those in flight."""
    if not name:
        if json:
            write_json(overview["groups"])
        else:
            show([group_table(overview["groups"])._replace(empty="none; 'rankmesh run' starts a job")])
        return OK
    found = [each for each in overview["groups"] if name in (each["id"], each["name"])]
    if not found:
        there = ", ".join(sorted({each["name"] for each in overview["groups"]})) or "none"
        raise CommandError(f"there is no group {name!r}; there are: {there}", NEGATIVE)
    if len(found) > 1:
        ids = ", ".join(f"{each['id']} ({each['job']}, epoch {each['epoch']})" for each in found)
        raise CommandError(f"{len(found)} groups are called {name!r}: give --job, or one of the ids {ids}", USAGE)
    (group,) = found
    calls = [each for each in overview["inflight"] if each["group"] == group["id"]]
    if json:
        write_json({**group, "inflight": calls})
    else:
        title = f"Group {group['id']}"
        show([group_table([group])._replace(title=title), _members(group, overview), inflight_table(calls)])
    return NEGATIVE if group["failure"] else OK


def _members(group: Mapping[str, Any], overview: Overview) -> Table:
    there = [each for each in overview["ranks"] if (each["job"], each["epoch"]) == (group["job"], group["epoch"])]
    known = {each["member"]["rank"]: (each["member"]["host"], each["state"]) for each in there}
    ages = {member: report_age([age]) for member, age in group.get("ages", {}).items()}
    rows = [
        [str(rank), *known.get(rank, ("?", "?")), str(group["seqs"].get(str(rank), "?")), ages.get(str(rank), "")]
        for rank in group["ranks"]
    ]
    return Table("Members", [">rank", "host", "state", ">operations", ">updated"], rows).without_empty_column()
