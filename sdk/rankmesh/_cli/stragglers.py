"""``rankmesh stragglers``: which ranks make the others wait, how long, since when, and why."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.chrome_trace import since, spans_of, uncertainty_of
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, command, print_error, write, write_json
from rankmesh._cli.lateness import Straggler, stragglers, usage_of
from rankmesh._cli.options import PATIENCE, GatewayOption, JobOption, JsonOption, PatienceOption, TokenFileOption
from rankmesh._cli.overview import fetch_snapshots
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.sentences import subject, verb
from rankmesh_gateway.humanize import seconds as time_text

_SAMPLE_SECONDS = 1.0


@command
def find_stragglers(
    seconds: Annotated[float, typer.Option(min=0.1, help="Look at the calls of the last seconds.")] = 60.0,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Report which ranks make the others wait: how much of the time, how often, since when, and what they do meanwhile.

    Looks at the calls that the flight recorders keep, and for a second at what the processes do.

    Exit code 0: none does; 1: one does; 3: no gateway, or one of the ranks, answers.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        before = fetch_snapshots(service, job, patience, records=True)
        time.sleep(_SAMPLE_SECONDS)
        after = fetch_snapshots(service, job, patience, records=True)
    silent = [each for each in after if each["snapshot"] is None]
    answers = {(each["job"], each["rank"]): each for each in after if each["snapshot"] is not None}
    found: list[tuple[str, Straggler, str]] = []
    for name in sorted({each["job"] for each in answers.values()}):
        ranks = {rank: each for (of_job, rank), each in answers.items() if of_job == name}
        usage = {
            each["rank"]: usage_of(each, ranks[each["rank"]])
            for each in before
            if each["job"] == name and each["rank"] in ranks and each["snapshot"] is not None
        }
        known = {rank: each for rank, each in ranks.items() if rank in usage}
        spans = since(spans_of([*known.values()]), seconds, None)
        hosts = {rank: each["host"] for rank, each in known.items()}
        late = stragglers(spans, usage, hosts, uncertainty_of([*known.values()]))
        found += [(name, each, known[each.ranks[0]]["place"]) for each in late]
    if json:
        write_json([{"job": name, **asdict(each), "place": place} for name, each, place in found])
    else:
        write(
            "".join(f"{printable(_text(each, place))}\n" for _, each, place in found) or "no rank makes others wait\n"
        )
    for each in silent:
        print_error(f"rank {each['rank']} does not answer: {each['error']}; 'rankmesh diagnose' explains it")
    return UNREACHABLE if silent else NEGATIVE if found else OK


def _text(found: Straggler, place: str) -> str:
    who, come, make = subject(found.ranks), verb(found.ranks, "it", "they"), verb(found.ranks, "makes", "make")
    often = f"{come} came last to {found.last} of {found.calls} collectives, by {time_text(found.late)}"
    begun = f"since {time_text(found.since)} ago"
    why = f"{come} {found.why}" + (f"; rank {found.ranks[0]} is at {place} now" if place else "")
    return f"{who} {make} the others wait {found.lost:.0%} of the time: {often}, {begun}; {why}"
