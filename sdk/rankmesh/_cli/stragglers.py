"""``rankmesh stragglers``: which ranks make the others wait, how long, since when, and why."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, command, print_error, write, write_json
from rankmesh._cli.options import PATIENCE, GatewayOption, JobOption, JsonOption, PatienceOption, TokenFileOption
from rankmesh._cli.overview import fetch_stragglers
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.sentences import subject, verb
from rankmesh_gateway.humanize import seconds as time_text
from rankmesh_gateway.schemas import Straggler


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

    Looks at the calls that the flight recorders keep, and at what the processes have done in the last seconds.

    Exit code 0: none does; 1: one does; 3: no gateway, or one of the ranks, answers.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        found = fetch_stragglers(service, job, seconds, patience)
    if json:
        write_json([asdict(each) for each in found.stragglers])
    else:
        lines = [f"{printable(_text(each))}\n" for each in found.stragglers]
        write("".join(lines) or "no rank makes others wait\n")
    for each in found.silent:
        print_error(f"rank {each.rank} is left out: {each.detail}; 'rankmesh diagnose' explains it")
    return UNREACHABLE if found.silent else NEGATIVE if found.stragglers else OK


def _text(found: Straggler) -> str:
    who, come, make = subject(found.ranks), verb(found.ranks, "it", "they"), verb(found.ranks, "makes", "make")
    if not found.calls:
        return f"{who} {make} the others wait {found.lost:.0%} of the time: {come} {found.why}"
    often = f"{come} came last to {found.last} of {found.calls} collectives, by {time_text(found.late)}"
    begun = f"since {time_text(found.since)} ago"
    why = f"{come} {found.why}" + (f"; rank {found.ranks[0]} is at {found.place} now" if found.place else "")
    return f"{who} {make} the others wait {found.lost:.0%} of the time: {often}, {begun}; {why}"
