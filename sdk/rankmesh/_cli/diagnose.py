"""``rankmesh diagnose``: reports in words why a job is stuck."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.exit_codes import NEGATIVE, OK, USAGE, CommandError, command, write
from rankmesh._cli.options import (
    PATIENCE,
    GatewayOption,
    JobOption,
    JsonOption,
    PatienceOption,
    TokenFileOption,
    settings,
)
from rankmesh._cli.overview import Finding, Verdict, fetch_findings, fetch_overview, judge
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.diagnosis.stalls import find_stalls


@command
def diagnose(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Directory with dumps of flight recorders, of a job that is over; else a job that runs is diagnosed.",
        ),
    ] = None,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Report why a job is stuck: which rank, in which call or line, since when, which ranks wait for it, what to do.

    With a directory, why it was stuck, from the dumps that its ranks have left: in RANKMESH_DUMP_DIR, or from torch's
    flight recorder.

    Exit code 0: no rank has waited for another for a second or longer; 1: one has, or a rank does not answer or has
    failed, or 'rankmesh status' reports another problem; 3: no gateway answers. With a directory, 0: no rank waited for
    another; 1: one did, or left no dump.
    """
    if directory is not None:
        if gateway or token_file is not None:
            raise CommandError("a directory of dumps needs no gateway: leave out --gateway and --token-file", USAGE)
        from rankmesh._cli.dumps import read_dumps

        url, reports = directory.absolute().as_uri(), read_dumps(directory, job)
        verdict = Verdict([vars(each) for each in find_stalls(reports, over=True)], [], [])
        nothing = f"nothing was stuck: there are {len(reports)} dumps in {directory}, and no rank waited"
    else:
        from rankmesh._cli.snapshots import fetch_reports

        with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
            overview = fetch_overview(service, job)
            reports = fetch_reports(service, overview, patience, settings().shm_dir)
            if any(report.refused for report in reports):  # a credential to read: the gateway asks the agents
                found = fetch_findings(service, job)
            else:
                found = [vars(each) for each in find_stalls(reports, overview["groups"])]
            verdict = judge(overview, found)
            url, nothing = service.url, _nothing_stuck(reports, service.url)
    if json:
        json_output.write(_document(reports, verdict, url))
    else:
        lines = [*_findings(reports, verdict.findings), *map(printable, verdict.others)] or [printable(nothing)]
        write("\n".join([*lines, *map(printable, verdict.remarks)]) + "\n")
    return OK if verdict.ok else NEGATIVE


def _document(reports: Sequence[RankReport], verdict: Verdict, url: str) -> dict[str, object]:
    return {
        "ok": verdict.ok,
        "time": time.time(),
        "url": url,
        "findings": verdict.findings,
        "problems": verdict.others,
        "remarks": verdict.remarks,
        "ranks": [
            {
                "job": report.job,
                "epoch": report.epoch,
                "rank": report.rank,
                "host": report.host,
                "pid": report.pid,
                "state": report.state,
                "reason": report.reason,
                "answers": report.snapshot is not None,
                "error": report.error,
                "process": report.process,
                "calls": (report.snapshot or {}).get("calls", []),
                "store_waits": (report.snapshot or {}).get("store_waits", []),
                "stacks": (report.snapshot or {}).get("stacks", []),
            }
            for report in reports
        ],
    }


def _nothing_stuck(reports: Sequence[RankReport], url: str) -> str:
    jobs = sorted({report.job for report in reports})
    if not jobs:
        return f"there is no job at {url}; 'rankmesh run' starts one"
    count = "1 rank answers" if len(reports) == 1 else f"{len(reports)} ranks answer"
    return f"nothing is stuck in {', '.join(jobs)}: {count}, and none waits for another"


def _findings(reports: Sequence[RankReport], found: Sequence[Finding]) -> Iterator[str]:
    jobs = {report.job for report in reports}
    for each in found:
        of_job = f"job {each['job']}: " if len(jobs) > 1 else ""
        yield printable(f"{of_job}{each['text']}")
        if each["last"]:
            yield printable(f"  last common operation: {each['last']}")
        remark = "; the wait is young, and may be a slow step: ask again" if each["young"] else ""
        yield printable(f"  what to do: {each['remedy']}{remark}")
