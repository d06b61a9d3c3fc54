"""``rankmesh stacks``: the Python stacks of ranks, the user's frames in full and the others folded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import NEGATIVE, OK, UNREACHABLE, command, print_error, write, write_json
from rankmesh._cli.options import (
    PATIENCE,
    GatewayOption,
    JobOption,
    JsonOption,
    PatienceOption,
    TokenFileOption,
)
from rankmesh_agent.wire.printable import printable
from rankmesh_gateway.diagnosis.frames import Frame, Thread, folded, short, user_threads
from rankmesh_gateway.humanize import ranks

Details = Mapping[str, Any]
"""The JSON of RankDetails."""


@command
def stacks(
    rank: Annotated[list[int] | None, typer.Argument(metavar="RANK", help="Only these ranks.")] = None,
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    every: Annotated[bool, typer.Option("--all", help="Show all threads and all frames.")] = False,
    patience: PatienceOption = PATIENCE,
    json: JsonOption = False,
) -> int:
    """Show where the ranks are in your code: their Python stacks, with the frames of RankMesh and libraries folded.

    Exit code 0: all of them answer; 1: there is no such rank; 3: no gateway, or one of the ranks, answers.
    """
    from rankmesh._cli.overview import fetch_snapshots

    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        found = fetch_snapshots(service, job, patience, rank or ())
    missing = sorted(set(rank or ()) - {each["rank"] for each in found})
    silent = [each for each in found if each["snapshot"] is None]
    if json:
        write_json([_document(each) for each in found])
    else:
        several = len({each["job"] for each in found}) > 1
        write("\n".join("\n".join(stack_lines(each, several=several, every=every)) + "\n" for each in found))
    for each in silent:
        print_error(f"{_name(each)} does not answer: {each['error']}; 'rankmesh diagnose' explains it")
    if missing:
        print_error(f"there is no rank {ranks(missing)}; 'rankmesh status' lists the ranks")
    if not found and not missing:
        print_error("there are no ranks; 'rankmesh run' starts some")
    return NEGATIVE if missing or not found else UNREACHABLE if silent else OK


def _document(details: Details) -> dict[str, object]:
    found = details["snapshot"] or details["outside"]
    return {
        **{name: details[name] for name in ("job", "epoch", "rank", "host", "pid")},
        "attached": found.get("attached", False),
        "error": details["error"],
        "stacks": found.get("stacks", []),
    }


def _name(details: Details) -> str:
    return f"rank {details['rank']} ({details['host']}, pid {details['pid']})"


def stack_lines(details: Details, *, several: bool, every: bool = False) -> Iterator[str]:
    """Yield the lines of a rank's stacks; ``several``: name its job; ``every``: all threads and frames."""
    title = f"{_name(details)} of {details['job']}" if several else _name(details)
    snapshot = details["snapshot"]
    threads = (snapshot or details["outside"])["stacks"]
    if snapshot is not None:
        yield title
    else:
        yield f"{title}: no answer" + ("; its stacks as py-spy sees them" if threads else "")
        if not threads:
            return
    if snapshot is not None and snapshot["attached"]:
        yield "  its process is attached to this agent; these are the agent's stacks"
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
