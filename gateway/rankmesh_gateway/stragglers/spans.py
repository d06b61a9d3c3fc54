"""The calls of all ranks on one clock, as the flight recorders have them. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rankmesh_agent.wire.snapshot import RankSnapshot, SnapshotCall
from rankmesh_gateway.schemas import RankDetails

STEP = "step"
"""Operation of a record that ``mark_step`` makes."""


class Span(NamedTuple):
    """A call of a rank: when it began and ended, in seconds of the gateway's clock."""

    rank: int
    begin: float
    end: float
    group: str
    call: SnapshotCall
    ended: bool


class Clock(NamedTuple):
    """The clock of a host: what the gateway's is ahead of it, and by how much that may be wrong, in seconds."""

    uncertainty: float
    ahead: float


def _answers(details: Sequence[RankDetails]) -> list[tuple[RankDetails, RankSnapshot]]:
    return [(each, each.snapshot) for each in details if each.snapshot is not None]


def clocks_of(details: Sequence[RankDetails]) -> dict[str, Clock]:
    """Return the clocks of the hosts of ranks: that by which the answer that was the quickest has been timed counts."""
    found: dict[str, Clock] = {}
    for each, snapshot in _answers(details):
        clock = Clock(each.uncertainty, each.time - snapshot.monotonic)
        found[each.host] = min(clock, found.get(each.host, clock))
    return found


def uncertainty_of(details: Sequence[RankDetails]) -> float:
    """Return the seconds by which the clocks of two hosts may be wrong; 0 on one host."""
    clocks = clocks_of(details)
    return sum(sorted(clock.uncertainty for clock in clocks.values())[-2:]) if len(clocks) > 1 else 0.0


def spans_of(details: Sequence[RankDetails]) -> list[Span]:
    """Return the calls of the ranks of a job, in the order of their begins; those under way end with the snapshot."""
    clocks, found = clocks_of(details), list[Span]()
    for each, snapshot in _answers(details):
        at = snapshot.monotonic + clocks[each.host].ahead
        names = {group.id: group.name for group in snapshot.groups}
        kept = [*((call, True) for call in snapshot.ended), *((call, False) for call in snapshot.calls)]
        for call, ended in kept:
            group, since = names.get(call.group, call.group), at - call.age
            begin, end = (since - call.seconds, since) if ended else (since, at)
            found.append(Span(each.rank, begin, end, group, call, ended))
    return sorted(found, key=lambda span: span.begin)


def store_waits_of(details: Sequence[RankDetails]) -> list[Span]:
    """Return the waits for keys of the store that are under way, as ``spans_of`` does calls."""
    clocks, found = clocks_of(details), list[Span]()
    for each, snapshot in _answers(details):
        at = snapshot.monotonic + clocks[each.host].ahead
        for wait in snapshot.store_waits:
            call = SnapshotCall("store", 0, wait.op, f"{wait.op}({', '.join(wait.keys)})", wait.age, peer=-1)
            found.append(Span(each.rank, at - wait.age, at, "store", call, False))
    return found


def since(spans: Sequence[Span], seconds: float | None, steps: int | None) -> list[Span]:
    """Return the spans of the last seconds, and of the last steps that the ranks have marked, where one is given."""
    begin = float("-inf")
    if seconds is not None:
        begin = max((span.end for span in spans), default=0.0) - seconds
    if steps is not None:
        by_rank: dict[int, list[float]] = defaultdict(list)
        for span in spans:
            if span.call.op == STEP:
                by_rank[span.rank].append(span.begin)
        first = [marks[-steps:][0] for marks in by_rank.values()]
        begin = max(begin, min(first, default=begin))
    return [span for span in spans if span.end >= begin]


def collectives_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the collectives that more than one rank has begun: the span of each rank."""
    by_call: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.call.peer is None and span.call.seq > 0:
            by_call[span.call.group, span.call.seq].append(span)
    return [ranks for ranks in by_call.values() if len(ranks) > 1]
