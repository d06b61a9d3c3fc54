"""``rankmesh status``: ranks, agents, groups, and the calls in flight."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, CommandError, command, write_json
from rankmesh._cli.options import GatewayOption, JobOption, JsonOption, TokenFileOption
from rankmesh._cli.overview import Overview, Verdict, fetch_diagnosis, fetch_overview, summary, tables
from rankmesh._cli.tables import Table, lines, show
from rankmesh_agent.wire.printable import printable

_LEAST_INTERVAL = 0.1


@command
def status(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit; the default without a terminal.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=_LEAST_INTERVAL, help="Seconds between refreshes.")
    ] = 1.0,
    json: JsonOption = False,
) -> int:
    """Show ranks, hosts, groups, rates and operations in flight; on a terminal, refresh them until Ctrl-C.

    Exit code 0: all is well; 1: 'rankmesh diagnose' has a finding, a rank or an agent is suspect or has failed, or a
    group has failed; 3: no gateway answers.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        overview, verdict = _look(service, job)
        if json:
            found = {"ok": verdict.ok, "complaints": verdict.sentences, "remarks": verdict.remarks, "url": service.url}
            write_json({**found, **overview, "findings": verdict.findings, "problems": verdict.problems})
        elif once or not sys.stdout.isatty():
            show(_all(overview, verdict, service.url))
        else:
            verdict = _live(service, job, overview, verdict, interval)
    return OK if verdict.ok else NEGATIVE


def _look(service: ServiceClient, job: str) -> tuple[Overview, Verdict]:
    overview = fetch_overview(service, job)
    return overview, Verdict(fetch_diagnosis(service, job)["problems"], (each["job"] for each in overview["ranks"]))


def _all(overview: Overview, verdict: Verdict, url: str, remark: str = "") -> list[Table]:
    text = "\n  ".join(map(printable, verdict.sentences + verdict.remarks)) or "all is well"
    return [Table(summary(overview, url) + remark, [], [], text), *tables(overview)]


def _live(service: ServiceClient, job: str, overview: Overview, verdict: Verdict, interval: float) -> Verdict:
    """Refresh the tables until Ctrl-C; return the last verdict."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    remark = ""
    with Live(console=Console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            while True:
                text = lines(_all(overview, verdict, service.url, remark), coloured=True)
                live.update(Text.from_ansi(text), refresh=True)
                time.sleep(interval)
                try:
                    (overview, verdict), remark = _look(service, job), ""
                except CommandError as error:
                    if error.code != UNREACHABLE:
                        raise
                    remark = remark or f"; NO ANSWER since {time.strftime('%H:%M:%S')}"
        except KeyboardInterrupt:
            return verdict
