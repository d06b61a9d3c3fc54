"""``rankmesh diagnose``: reports in words why a job is stuck."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rankmesh._cli import json_output, options
from rankmesh._cli.exit_codes import NEGATIVE, OK, command, write
from rankmesh._cli.options import (
    PATIENCE,
    GatewayOption,
    JobOption,
    JsonOption,
    PatienceOption,
    TokenFileOption,
    settings,
)
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.diagnosis.stalls import Stall, find_stalls
from rankmesh_gateway.humanize import printable


@command
def diagnose(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Report why a job is stuck: which rank, in which call or line, since when, which ranks wait for it, what to do.

    Exit code 0: no rank has waited for another for a second or longer; 1: one has, or a rank does not answer or has
    failed; 3: no gateway answers.
    """
    from rankmesh._cli.snapshots import fetch_reports

    with contextlib.closing(options.gateway(gateway, token_file)) as service:
        reports, groups = fetch_reports(service, job, patience, settings().shm_dir)
        found = find_stalls(reports, groups)
        if json:
            json_output.write(_document(reports, found, service.url))
        else:
            write("\n".join(_text(reports, found, service.url)) + "\n")
    return NEGATIVE if found else OK


def _document(reports: Sequence[RankReport], found: Sequence[Stall], url: str) -> dict[str, object]:
    return {
        "ok": not found,
        "time": time.time(),
        "url": url,
        "findings": [{**vars(each), "young": each.young} for each in found],
        "ranks": [
            {
                "job": report.job,
                "epoch": report.epoch,
                "rank": report.rank,
                "host": report.host,
                "pid": report.pid,
                "state": report.state,
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


def _text(reports: Sequence[RankReport], found: Sequence[Stall], url: str) -> Iterator[str]:
    jobs = sorted({report.job for report in reports})
    if not jobs:
        yield f"there is no job at {url}; 'rankmesh run' starts one"
    elif not found:
        count = "1 rank answers" if len(reports) == 1 else f"{len(reports)} ranks answer"
        yield f"nothing is stuck in {', '.join(map(printable, jobs))}: {count}, and none waits for another"
    for each in found:
        of_job = f"job {each.job}: " if len(jobs) > 1 else ""
        yield printable(f"{of_job}{each.text}")
        if each.last:
            yield printable(f"  last common operation: {each.last}")
        remark = "; the wait is young, and may be a slow step: ask again" if each.young else ""
        yield printable(f"  what to do: {each.remedy}{remark}")
