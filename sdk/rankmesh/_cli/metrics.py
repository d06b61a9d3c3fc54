"""``rankmesh metrics``: a dashboard for Grafana and alert rules for Prometheus, over the metrics of RankMesh."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from rankmesh._cli.exit_codes import OK, USAGE, CommandError, command, write


@command
def metrics(
    grafana: Annotated[bool, typer.Option("--grafana", help="Print a dashboard for Grafana, as JSON.")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print alert rules for Prometheus, as YAML.")] = False,
) -> int:
    """Print a dashboard, or alert rules, over the metrics of gateways and agents ('rankmesh get /metrics')."""
    if grafana == alerts:
        raise CommandError("give one of --grafana and --alerts; 'rankmesh get /metrics' prints the metrics", USAGE)
    write((files("rankmesh._cli") / "monitoring" / ("grafana.json" if grafana else "alerts.yaml")).read_bytes())
    return OK
