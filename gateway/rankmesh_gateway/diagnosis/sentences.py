"""Sentences of ``rankmesh diagnose`` on the ranks of a job: what holds them up, where they are, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rankmesh_agent.wire.snapshot import RUNNING
from rankmesh_gateway import humanize
from rankmesh_gateway.diagnosis.reports import DUMPED, NO_DUMP, RankReport
from rankmesh_gateway.diagnosis.waits import JobView, Wait
from rankmesh_gateway.humanize import seconds
from rankmesh_gateway.schemas import FindingKind

_NAMED = 4
"""Maximum number of places, and of keys, in a sentence."""


# What holds ranks up


def without_answer(
    view: JobView, ranks: Sequence[int], wait: Wait | None, direct: Sequence[tuple[int, Wait]], age: float
) -> Iterator[str]:
    """Yield the sentences on ranks that do not answer, or have left no dump."""
    report = view.reports[ranks[0]]
    if report.state == NO_DUMP:
        yield f"{subject(ranks)} left no dump" + (f" ({report.error})" if report.error else "")
    else:
        how = "cannot go on" if report.observed and report.outside.state else "does not answer"
        yield f"{subject(ranks)} {'has no known stack' if _lacks_stack(report) else how}: {_state_of(view, ranks[0])}"
        yield _whereabouts(view, ranks)
    if len(ranks) == 1 and (last := view.last_of(ranks[0], wait)):
        yield f"its last operation was {last}"
    if direct:
        yield f"{_waiters(view, direct)} in {direct[0][1].label} for {seconds(age)}"


def without_key(
    view: JobView, ranks: Sequence[int], wait: Wait, direct: Sequence[tuple[int, Wait]], age: float
) -> Iterator[str]:
    """Yield the sentences on ranks that wait for keys of the store."""
    names = ", ".join(map(repr, wait.keys[:_NAMED])) + (", ..." if len(wait.keys) > _NAMED else "")
    one = len(wait.keys) == 1
    keys = f"key {names}, which no rank has set" if one else f"keys {names}, which are not all set"
    yield f"{subject(ranks)} {verb(ranks, 'waits', 'wait')} in {wait.label} for {keys}, for {seconds(age)}"
    yield _whereabouts(view, ranks)
    if direct:
        yield f"{_waiters(view, direct)} in {direct[0][1].label}"


def slow(view: JobView, ranks: Sequence[int], wait: Wait, age: float) -> Iterator[str]:
    """Yield the sentences on ranks that are all in a call, and wait in it."""
    comers = "all ranks" if wait.kind == "collective" else "both ranks"
    yield f"{comers} have come to {wait.label}, and it goes on for {seconds(age)}"
    yield _whereabouts(view, ranks)


def elsewhere(view: JobView, ranks: Sequence[int], direct: Sequence[tuple[int, Wait]], age: float) -> Iterator[str]:
    """Yield the sentences on ranks that have not come to a call."""
    first, wait = direct[0]
    call = wait.label if wait.kind == "collective" else f"{wait.label}, where rank {first} waits,"
    yield f"{subject(ranks)} {verb(ranks, 'has', 'have')} not come to {call} for {seconds(age)}"
    yield _whereabouts(view, ranks)
    if len(ranks) == 1 and (outside := view.reports[ranks[0]].outside).state == "D":
        yield f"it waits in the kernel ({outside.wchan or 'for a disk perhaps'})"
    if len(ranks) == 1 and view.reports[ranks[0]].last:
        yield f"its last operation was {view.reports[ranks[0]].last}"
    yield _waiters(view, direct)


# Where they are, and what to do


def _lacks_stack(report: RankReport) -> bool:
    """Return whether an observed rank runs, and its observer has not got its stack."""
    return report.observed and bool(report.outside.no_stacks) and report.outside.state in RUNNING


def _state_of(view: JobView, rank: int) -> str:
    report = view.reports[rank]
    outside = report.outside
    where = f"process {report.pid} on {report.host}"
    if outside.frozen:
        return f"{where} is frozen by its control group, {outside.frozen}"
    if _lacks_stack(report):
        return f"{where} runs"
    states = {
        "T": f"{where} is stopped (SIGSTOP, or Ctrl-Z)",
        "t": f"{where} is stopped by a debugger",
        "-": f"{where} has ended",
        "Z": f"{where} has ended",
        "X": f"{where} has ended",
        "R": f"{where} computes, and the agent's thread in it does not run",
        "S": f"{where} is alive, and the agent's thread in it does not run",
        "D": f"{where} waits in the kernel{f' ({outside.wchan})' if outside.wchan else ''}, for a disk perhaps",
    }
    text = states.get(outside.state, f"{report.error} from {report.url} ({where})")
    return text + (f", and {humanize.size(outside.swap_bytes)} of its memory are in swap" if outside.swap_bytes else "")


def _whereabouts(view: JobView, ranks: Sequence[int]) -> str:
    """Return where ranks are: ``it is at x.py:8 in f``, ``ranks 2-3 are at x.py:8``."""
    if len(ranks) == 1:
        return _at(view, ranks, "it is at ")
    return _listed(view, ranks, "is at", "are at")


def _waiters(view: JobView, direct: Sequence[tuple[int, Wait]]) -> str:
    return waiting_at(view, sorted({rank for rank, _ in direct}))


def waiting_at(view: JobView, ranks: Sequence[int]) -> str:
    """Return where ranks wait: ``rank 0 waits at x.py:8, ranks 1-2 wait at …``."""
    return _listed(view, ranks, "waits at", "wait at")


def _listed(view: JobView, ranks: Sequence[int], one: str, several: str) -> str:
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_place[_place_text(view, rank)].append(rank)
    texts = []
    for text, there in by_place.items():
        found = verb(there, one, several)
        texts.append(f"{subject(there)} {f'{found} {text}' if text else found.removesuffix(' at')}")
    more = sum(len(there) for there in list(by_place.values())[_NAMED:])
    return ", ".join([*texts[:_NAMED], *([f"{more} more elsewhere"] if more else [])])


def in_calls(view: JobView, calls: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return which ranks are in which call: ``rank 0 is in send to rank 1 at x.py:8, ranks 1-2 are in …``."""
    texts = [f"{subject(ranks)} {verb(ranks, 'is', 'are')} in {call}{_at(view, ranks)}" for call, ranks in calls]
    return ", ".join(texts[:_NAMED])


def _at(view: JobView, ranks: Sequence[int], before: str = " at ") -> str:
    texts = list(dict.fromkeys(text for rank in ranks if (text := _place_text(view, rank))))
    return f"{before}{' and '.join(texts[:2])}" if texts else ""


def _place_text(view: JobView, rank: int) -> str:
    place = view.places.get(rank)
    return "" if place is None else str(place)


def place_texts(view: JobView, ranks: Iterable[int]) -> dict[int, str]:
    """Return the lines where ranks are, of those whose line is known."""
    places = {rank: view.places.get(rank) for rank in sorted(set(ranks))}
    return {rank: f"{place.file}:{place.line}" for rank, place in places.items() if place is not None}


def remedy(view: JobView, kind: FindingKind, ranks: Sequence[int]) -> str:
    """Return what to do about ranks."""
    report = view.reports[ranks[0]]
    numbers = " ".join(map(str, ranks[:_NAMED]))
    if report.outside.frozen:
        return f"thaw that control group on {report.host}; for a container, 'docker unpause' does"
    if kind == "stopped" and report.outside.state == "t":
        return f"look at the debugger that holds process {report.pid} on {report.host}"
    if kind == "stopped":
        return f"'kill -CONT {report.pid}' on {report.host} lets it go on"
    if kind == "ended":
        return "look at its output, and start the job again"
    if report.state == NO_DUMP:
        whose = "its" if len(ranks) == 1 else "their"
        return f"look at {whose} output: a rank that has ended, or is held up in C code, writes no dump"
    if _lacks_stack(report):
        return report.outside.no_stacks
    if report.outside.state == "D":
        return (
            f"look at that line, and at the disk or the mount that it uses: 'cat /proc/{report.pid}/stack' on "
            f"{report.host}, as root, shows what the kernel waits for"
        )
    if kind == "silent" and report.outside.state:
        helps = f"; {report.outside.no_stacks}" if report.outside.no_stacks else ""
        return (
            "C code that holds the interpreter's lock (GIL) is the likely cause: 'py-spy dump --native --pid "
            f"{report.pid}' or gdb on {report.host} shows it{helps}"
        )
    if kind == "silent":
        return f"see on {report.host} whether process {report.pid} runs; 'rankmesh doctor' measures the network"
    if kind == "key":
        by_hand = "" if report.state == DUMPED else "; 'rankmesh store set' sets it by hand"
        return f"look for the rank that should set it{by_hand}"
    if kind == "slow":
        return "'rankmesh doctor' measures the paths between the ranks"
    if all(view.snapshots[rank]["attached"] for rank in ranks if rank in view.snapshots):
        return "look at the stack of its process ('py-spy dump'): the agent that it is attached to does not have it"
    if report.state == DUMPED:
        known = view.places.get(ranks[0]) is not None
        return "look at that line" if known else "look at its output: the dump has no line of a rank without a call"
    return f"look at that line; 'rankmesh stacks {numbers}' has the whole stack"


def subject(ranks: Sequence[int]) -> str:
    """Return ranks as a subject: ``rank 2``, ``ranks 0-1, 3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {humanize.ranks(ranks)}"


def verb(ranks: Sequence[Any], one: str, several: str) -> str:
    """Return the form of a verb for one rank or for several."""
    return one if len(ranks) == 1 else several
