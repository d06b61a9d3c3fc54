"""``rankmesh stacks``: the Python stacks of ranks, the user's frames in full and the others folded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from rankmesh._cli import json_output, options
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, command, print_error, write
from rankmesh._cli.options import (
    PATIENCE,
    GatewayOption,
    JobOption,
    JsonOption,
    PatienceOption,
    TokenFileOption,
    settings,
)
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.frames import Frame, Thread, folded, short, user_threads
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.humanize import ranks


@command
def stacks(
    rank: Annotated[list[int] | None, typer.Argument(metavar="RANK", help="Only these ranks.")] = None,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    every: Annotated[bool, typer.Option("--all", help="All threads, and all frames.")] = False,
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Show where the ranks are in your code: their Python stacks, with the frames of RankMesh and libraries folded.

    Exit code 0: all of them answer; 1: there is no such rank; 3: no gateway, or one of the ranks, answers.
    """
    from rankmesh._cli.overview import fetch_overview
    from rankmesh._cli.snapshots import fetch_reports

    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        reports = fetch_reports(service, fetch_overview(service, job), patience, settings().shm_dir, set(rank or ()))
    missing = sorted(set(rank or ()) - {report.rank for report in reports})
    silent = [report for report in reports if report.snapshot is None]
    if json:
        json_output.write([_document(report) for report in reports])
    else:
        several = len({report.job for report in reports}) > 1
        write("\n".join("\n".join(_text(report, several=several, every=every)) + "\n" for report in reports))
    for report in silent:
        hint = "stacks need the role 'run'" if report.refused else "'rankmesh diagnose' explains it"
        print_error(f"{report.name} does not answer: {report.error}; {hint}")
    if missing:
        print_error(f"there is no rank {ranks(missing)}; 'rankmesh status' lists the ranks")
    if not reports and not missing:
        print_error("there are no ranks; 'rankmesh run' starts some")
    return NEGATIVE if missing or not reports else UNREACHABLE if silent else OK


def _document(report: RankReport) -> dict[str, object]:
    found = report.snapshot or {}
    return {
        "job": report.job,
        "epoch": report.epoch,
        "rank": report.rank,
        "host": report.host,
        "pid": report.pid,
        "attached": found.get("attached", False),
        "error": report.error,
        "stacks": found.get("stacks", []),
    }


def _text(report: RankReport, *, several: bool, every: bool) -> Iterator[str]:
    title = f"{report.name} of {report.job}" if several else report.name
    if report.snapshot is None:
        yield f"{title}: no answer"
        return
    yield title
    if report.snapshot["attached"]:
        yield "  its process is attached to this agent; these are the agent's stacks"
    threads = report.snapshot["stacks"]
    shown = threads if every else user_threads(threads)
    for thread in shown:
        yield from _thread(thread, every=every)
    if hidden := len(threads) - len(shown):
        yield f"  {hidden} threads without a line of yours (--all shows them)"


def _thread(thread: Thread, *, every: bool) -> Iterator[str]:
    yield f"  Thread {printable(thread['name'])!r} (id {thread['native_id']}{', daemon' if thread['daemon'] else ''}):"
    for entry in thread["frames"] if every else folded(thread["frames"]):
        if isinstance(entry, list):
            yield f"    {_fold(entry)}"
            continue
        yield f'    File "{printable(entry["file"])}", line {entry["line"]}, in {printable(entry["function"])}'
        if entry["code"]:
            yield f"      {printable(entry['code'])}"


def _fold(frames: list[Frame]) -> str:
    """Return consecutive frames of one origin in a line: the first, the last, and their number."""
    who = "RankMesh" if frames[0]["origin"] == "rankmesh" else "library"
    functions = [printable(f"{frame['function']} ({short(frame)})") for frame in frames]
    if len(frames) == 1:
        return f"[{who}: {functions[0]}]"
    return f"[{who}: {functions[0]} ... {functions[-1]}, {len(frames)} frames]"
