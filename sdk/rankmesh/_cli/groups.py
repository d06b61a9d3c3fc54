"""``rankmesh groups``: all groups, or one of them rank by rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import NEGATIVE, OK, USAGE, CommandError, command, print_error, write_json
from rankmesh._cli.options import GatewayOption, JobOption, JsonOption, TokenFileOption
from rankmesh._cli.overview import Overview, fetch_overview, inflight, report_age
from rankmesh._cli.overview import groups as as_table
from rankmesh._cli.tables import Table, show


@command
def groups(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="Only this group: its name, or its id.")] = "",
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    json: JsonOption = False,
) -> int:
    """List the groups; with a name or an id, show the last operation of each rank of that group, and those in flight.

    Exit code 1: there is no such group, or it has failed.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        overview = fetch_overview(service, job)
    if not name:
        if json:
            write_json(overview["groups"])
        else:
            table = as_table(overview["groups"])
            show([table._replace(empty="none; 'rankmesh run' starts a job")])
        return OK
    found = [each for each in overview["groups"] if name in (each["id"], each["name"])]
    if not found:
        there = ", ".join(sorted({each["name"] for each in overview["groups"]})) or "none"
        print_error(f"there is no group {name!r}; there are: {there}")
        return NEGATIVE
    if len(found) > 1:
        raise CommandError(
            f"{len(found)} groups are called {name!r}: give --job, or one of the ids "
            + ", ".join(f"{each['id']} ({each['job']}, epoch {each['epoch']})" for each in found),
            USAGE,
        )
    (group,) = found
    calls = [each for each in overview["inflight"] if each["group"] == group["id"]]
    if json:
        write_json({**group, "inflight": calls})
    else:
        show([as_table([group])._replace(title=f"Group {group['id']}"), _members(group, overview), inflight(calls)])
    return NEGATIVE if group["failure"] else OK


def _members(group: Mapping[str, Any], overview: Overview) -> Table:
    known = {
        each["member"]["rank"]: each
        for each in overview["ranks"]
        if (each["job"], each["epoch"]) == (group["job"], group["epoch"])
    }
    rows = []
    for rank in group["ranks"]:
        seen = known.get(rank)
        rows.append(
            [
                str(rank),
                seen["member"]["host"] if seen else "?",
                seen["state"] if seen else "?",
                str(group["seqs"].get(str(rank), "?")),
                report_age(age for member, age in group.get("ages", {}).items() if member == str(rank)),
            ]
        )
    return Table("Members", [">rank", "host", "state", ">calls", ">as of"], rows).without_empty_column()
