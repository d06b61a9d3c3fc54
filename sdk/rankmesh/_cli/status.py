"""``rankmesh status``: who is there, how they are, and what they are doing."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.client import Service
from rankmesh._cli.exit_codes import DONE, NO, NOBODY, CommandError, reporting
from rankmesh._cli.options import GatewayOption, JobOption, JsonOption, TokenFileOption
from rankmesh._cli.overview import Overview, complaints, overview_of, summary, tables
from rankmesh._cli.tables import Table, show

_LEAST_INTERVAL = 0.1


@reporting
def status(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    once: Annotated[bool, typer.Option("--once", help="Once, not live; it is so without a terminal.")] = False,
    interval: Annotated[float, typer.Option(min=_LEAST_INTERVAL, help="Seconds between two looks.")] = 1.0,
    json: JsonOption = False,
) -> int:
    """Show ranks, hosts, groups, rates and what is in flight, live on a terminal until Ctrl-C.

    Exit code 0: all is well; 1: a rank or an agent is suspect or has failed, or a group has; 3: no gateway answers.
    """
    service = options.gateway(gateway, token_file)
    overview = overview_of(service, job)
    if json:
        found = complaints(overview)
        json_output.write({"ok": not found, "complaints": found, "url": service.url, **overview})
        return NO if found else DONE
    if once or not sys.stdout.isatty():
        show(_all(overview, service.url))
    else:
        overview = _live(service, job, overview, interval)
    return NO if complaints(overview) else DONE


def _all(overview: Overview, url: str, remark: str = "") -> list[Table]:
    return [
        Table(summary(overview, url) + remark, [], [], "\n  ".join(complaints(overview)) or "all is well"),
        *tables(overview),
    ]


def _live(service: Service, job: str, overview: Overview, interval: float) -> Overview:
    """Show it again and again until Ctrl-C; return what was seen last."""
    from rich.console import Console
    from rich.live import Live

    from rankmesh._cli.tables import renderable

    remark = ""
    with Live(console=Console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            while True:
                live.update(renderable(_all(overview, service.url, remark)), refresh=True)
                time.sleep(interval)
                try:
                    overview, remark = overview_of(service, job), ""
                except CommandError as error:
                    if error.code != NOBODY:
                        raise
                    remark = remark or f"; NO ANSWER since {time.strftime('%H:%M:%S')}"
        except KeyboardInterrupt:
            return overview
