"""``rankmesh trace``: the latest calls of all ranks, as a trace for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rankmesh._cli import options
from rankmesh._cli.chrome_trace import chrome_trace
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, USAGE, CommandError, command, print_error, write
from rankmesh._cli.options import PATIENCE, GatewayOption, JobOption, PatienceOption, TokenFileOption
from rankmesh._cli.overview import fetch_snapshots
from rankmesh_agent.wire import json_text
from rankmesh_gateway.schemas import RankDetails
from rankmesh_gateway.stragglers.spans import STEP, since, spans_of, store_waits_of


@command
def trace(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", dir_okay=False, help="The file to write, by default trace.json or trace.html."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Only the last steps that the program has marked by mark_step().")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Only the last seconds.")] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write a page that shows the trace in a browser, without a network.")
    ] = False,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: PatienceOption = PATIENCE,
) -> int:
    """Write the latest calls of all ranks as one trace in Chrome's format, which ui.perfetto.dev opens.

    Each rank is a process, each group a thread. Arrows lead from the rank that came last to a collective to those that
    waited for it, and from a send to its receive. Calls that overlap are in several threads. The calls are those
    that the flight recorders keep.

    Exit code 0: all ranks are in it; 1: there is no job, or several; 3: no gateway, or one of the ranks, answers.
    """
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        found = json_text.convert(list[RankDetails], fetch_snapshots(service, job, patience, records=True))
    jobs = sorted({each.job for each in found})
    if len(jobs) > 1:
        raise CommandError(f"there are several jobs: give one of {', '.join(jobs)} with --job", USAGE)
    answers = [each for each in found if each.snapshot is not None]
    for each in found:
        if each.snapshot is None:
            print_error(f"rank {each.rank} ({each.host}, pid {each.pid}) is not in it: {each.error}")
    if not answers:
        print_error("there is no rank to trace; 'rankmesh run' starts some")
        return NEGATIVE if not found else UNREACHABLE
    spans = spans_of(answers)
    if steps is not None and not any(span.call.op == STEP for span in spans):
        raise CommandError("the program marks no steps: call dist.mark_step() at the begin of each", USAGE)
    spans = since(sorted([*spans, *store_waits_of(answers)], key=lambda span: span.begin), seconds, steps)
    document = chrome_trace(answers, spans)
    output = output or Path("trace.html" if html else "trace.json")
    text = json.dumps(document)
    if html:
        page = (files("rankmesh._cli") / "trace.html").read_text()
        text = page.replace("TRACE", text.replace("<", "\\u003c"), 1)
    try:
        output.write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror}", USAGE) from error
    hosts = document["otherData"]["clock uncertainty in seconds"]
    about = f"{len(spans)} calls of {len(answers)} ranks" + (
        f", hosts' clocks within {hosts * 1e3:.2f} ms" if hosts else ""
    )
    write(f"{output}: {about}; {'a browser' if html else 'ui.perfetto.dev'} opens it\n")
    return OK if len(answers) == len(found) else UNREACHABLE
