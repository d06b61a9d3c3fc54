"""``rankmesh diagnose``: reports in words why a job is stuck."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import NEGATIVE, OK, USAGE, CommandError, command, write, write_json
from rankmesh._cli.options import PATIENCE, GatewayOption, JobOption, JsonOption, PatienceOption, TokenFileOption
from rankmesh._cli.overview import Verdict, fetch_diagnosis, fetch_overview, fetch_snapshots
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.stalls import find_stalls


@command
def diagnose(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Dumps of the flight recorders of a job that is over; without it, a running job is diagnosed.",
        ),
    ] = None,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Report why a job is stuck: which rank, in which call or line, since when, which ranks wait for it, what to do.

    With DIR, report why a job was stuck, from the dumps that its ranks have written to RANKMESH_DUMP_DIR, or those of
    torch's flight recorder.

    Exit code 0: no rank has waited for another for a second or longer; 1: one has, or a rank does not answer or has
    failed, or 'rankmesh status' reports another problem; 3: no gateway answers. With DIR, 0: no rank waited for
    another; 1: one did, or left no dump.
    """
    if directory is not None:
        if gateway or token_file is not None:
            raise CommandError("a directory of dumps needs no gateway: leave out --gateway and --token-file", USAGE)
        from rankmesh._cli.dumps import read_dumps

        url, reports = directory.absolute().as_uri(), read_dumps(directory, job)
        found = [
            {**vars(each), "outside": None, "process": "", "answers": each.snapshot is not None} for each in reports
        ]
        ranks = [_rank(each) for each in found]
        verdict = Verdict([vars(each) for each in find_stalls(reports, over=True)], (each.job for each in reports))
        nothing = f"nothing was stuck: there are {len(reports)} dumps in {directory}, and no rank waited"
    else:
        with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
            overview = fetch_overview(service, job)
            diagnosis = fetch_diagnosis(service, job, patience)
            found = diagnosis["ranks"]
            verdict = Verdict(diagnosis["problems"], (each["job"] for each in found))
            url, nothing = service.url, _nothing_stuck(found, service.url)
            if json:
                with contextlib.suppress(CommandError):  # a credential to read has the findings without the stacks
                    found = fetch_snapshots(service, job, patience)
                reasons = {_key(each, each["member"]): each["reason"] for each in overview["ranks"]}
                ranks = [_rank({**each, "reason": reasons.get(_key(each, each), "")}) for each in found]
    if json:
        write_json(_document(ranks, verdict, url))
    else:
        write(_text(verdict, nothing) + "\n")
    return OK if verdict.ok else NEGATIVE


def report(service: ServiceClient, without_ranks: str) -> str:
    """Return the report on the job of a gateway, as the command prints it; another text if no rank has joined."""
    diagnosis = fetch_diagnosis(service, patience=PATIENCE)
    verdict = Verdict(diagnosis["problems"], (each["job"] for each in diagnosis["ranks"]))
    found = diagnosis["ranks"]
    return _text(verdict, _nothing_stuck(found, service.url) if found else without_ranks)


def _text(verdict: Verdict, nothing: str) -> str:
    lines = list(_lines(verdict)) or [printable(nothing)]
    return "\n".join([*lines, *map(printable, verdict.remarks)])


def _key(place: Mapping[str, Any], rank: Mapping[str, Any]) -> tuple[str, int, int]:
    return place["job"], place["epoch"], rank["rank"]


def _document(ranks: Sequence[Mapping[str, Any]], verdict: Verdict, url: str) -> dict[str, object]:
    return {
        "ok": verdict.ok,
        "time": time.time(),
        "url": url,
        "findings": verdict.findings,
        "problems": verdict.others,
        "remarks": verdict.remarks,
        "ranks": ranks,
    }


def _rank(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank of the document, from the JSON of RankDetails, or of DiagnosedRank."""
    snapshot = found.get("snapshot") or found.get("outside") or {}
    names = ("job", "epoch", "rank", "host", "pid", "state", "reason", "answers", "error", "process")
    calls, waits, stacks = (snapshot.get(name, []) for name in ("calls", "store_waits", "stacks"))
    return {**{name: found[name] for name in names}, "calls": calls, "store_waits": waits, "stacks": stacks}


def _nothing_stuck(found: Sequence[Mapping[str, Any]], url: str) -> str:
    jobs = sorted({each["job"] for each in found})
    if not jobs:
        return f"there is no job at {url}; 'rankmesh run' starts one"
    count = "1 rank answers" if len(found) == 1 else f"{len(found)} ranks answer"
    return f"nothing is stuck in {', '.join(jobs)}: {count}, and none waits for another"


def _lines(verdict: Verdict) -> Iterator[str]:
    for each in verdict.problems:
        yield printable(verdict.sentence(each))
        if each["last"]:
            yield printable(f"  last common operation: {each['last']}")
        remark = "; the wait is young, and may be a slow step: ask again" if each["young"] else ""
        yield printable(f"  what to do: {each['remedy']}{remark}")
