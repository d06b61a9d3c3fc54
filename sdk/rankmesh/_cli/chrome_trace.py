"""The calls of all ranks as one trace in Chrome's format, which ui.perfetto.dev opens. Pure: no I/O, no clock.

Source of the format: the "Trace Event Format" document of Chrome's trace viewer; times are microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Details = Mapping[str, Any]
"""The JSON of RankDetails, with the records of the rank."""
_MICROSECONDS = 1e6
_GAP = 2e-9
"""Seconds between two calls of one thread at least: viewers cut the microseconds of a begin to whole nanoseconds."""
STEP = "step"
"""Operation of a record that ``mark_step`` makes."""


class Span(NamedTuple):
    """A call of a rank: when it began and ended, in seconds of the gateway's clock."""

    rank: int
    begin: float
    end: float
    group: str
    call: Mapping[str, Any]
    ended: bool


class Clock(NamedTuple):
    """The clock of a host: what the gateway's is ahead of it, and by how much that may be wrong, in seconds."""

    uncertainty: float
    ahead: float


def clocks_of(details: Sequence[Details]) -> dict[str, Clock]:
    """Return the clocks of the hosts of ranks: that by which the answer that was the quickest has been timed counts."""
    found: dict[str, Clock] = {}
    for each in details:
        clock = Clock(each["uncertainty"], each["time"] - each["snapshot"]["monotonic"])
        found[each["host"]] = min(clock, found.get(each["host"], clock))
    return found


def uncertainty_of(details: Sequence[Details]) -> float:
    """Return the seconds by which the clocks of two hosts may be wrong; 0 on one host."""
    clocks = clocks_of(details)
    return sum(sorted(clock.uncertainty for clock in clocks.values())[-2:]) if len(clocks) > 1 else 0.0


def spans_of(details: Sequence[Details]) -> list[Span]:
    """Return the calls of ranks, in the order of their begins; those under way end with the snapshot.

    Args:
        details: the ranks of one job that answer.
    """
    clocks, found = clocks_of(details), list[Span]()
    for each in details:
        snapshot, rank = each["snapshot"], each["rank"]
        at = snapshot["monotonic"] + clocks[each["host"]].ahead
        names = {group["id"]: group["name"] for group in snapshot["groups"]}
        kept = [*((call, True) for call in snapshot["ended"]), *((call, False) for call in snapshot["calls"])]
        for call, ended in kept:
            group, since = names.get(call["group"], call["group"]), at - call["age"]
            begin, end = (since - call["seconds"], since) if ended else (since, at)
            found.append(Span(rank, begin, end, group, call, ended))
    return sorted(found, key=lambda span: span.begin)


def store_waits_of(details: Sequence[Details]) -> list[Span]:
    """Return the waits for keys of the store that are under way, as ``spans_of`` does calls."""
    clocks, found = clocks_of(details), list[Span]()
    for each in details:
        at = each["snapshot"]["monotonic"] + clocks[each["host"]].ahead
        for wait in each["snapshot"]["store_waits"]:
            call = {"op": wait["op"], "call": f"{wait['op']}({', '.join(wait['keys'])})", "nbytes": 0, "seq": 0}
            found.append(Span(each["rank"], at - wait["age"], at, "store", {**call, "error": "", "peer": -1}, False))
    return found


def since(spans: Sequence[Span], seconds: float | None, steps: int | None) -> list[Span]:
    """Return the spans of the last seconds, and of the last steps that the ranks have marked, where one is given."""
    begin = float("-inf")
    if seconds is not None:
        begin = max((span.end for span in spans), default=0.0) - seconds
    if steps is not None:
        by_rank: dict[int, list[float]] = defaultdict(list)
        for span in spans:
            if span.call["op"] == STEP:
                by_rank[span.rank].append(span.begin)
        first = [marks[-steps:][0] for marks in by_rank.values()]
        begin = max(begin, min(first, default=begin))
    return [span for span in spans if span.end >= begin]


def chrome_trace(details: Sequence[Details], spans: Sequence[Span]) -> dict[str, Any]:
    """Return the document: a process for each rank, threads for each group, arrows from late ranks and senders.

    Args:
        details: the ranks.
        spans: their calls, in the order of their begins.
    """
    origin = min((span.begin for span in spans), default=0.0)
    threads, names = _threads(spans)
    events: list[dict[str, Any]] = []
    for each in details:
        name = f"rank {each['rank']} ({each['host']}, pid {each['pid']})"
        events.append({"ph": "M", "name": "process_name", "pid": each["rank"], "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": each["rank"], "args": {"sort_index": each["rank"]}}
        )
    for rank, thread in sorted({(span.rank, threads[id(span)]) for span in spans}):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": names[thread]}})
    uncertainty = uncertainty_of(details)
    arrows = [*_late_arrivals(spans), *_messages(spans, uncertainty)]
    waited = {id(awaiting): source for source, awaiting, kind in arrows if kind == "waits"}
    for span in spans:
        place = {"pid": span.rank, "tid": threads[id(span)], "ts": _at(span.begin, origin)}
        if span.call["op"] == STEP:
            events.append({"ph": "i", "s": "p", "name": span.call["call"], **place})
            continue
        arguments = {"call": span.call["call"], "bytes": span.call["nbytes"], "number": span.call["seq"]}
        if span.call.get("algorithm"):
            arguments["algorithm"] = span.call["algorithm"]
        if span.call["error"]:
            arguments["error"] = span.call["error"]
        if not span.ended:
            arguments["state"] = "under way"
        if id(span) in waited:
            late = waited[id(span)]
            arguments |= {"waited for": f"rank {late.rank}", "waited": f"{(late.begin - span.begin) * 1e3:.3f} ms"}
        duration = _at(span.end, span.begin)
        events.append(
            {"ph": "X", "name": span.call["op"], "cat": "rankmesh", "dur": duration, "args": arguments, **place}
        )
    for number, (source, target, kind) in enumerate(arrows):
        common = {"cat": kind, "name": kind, "id": number}
        start = {"pid": source.rank, "tid": threads[id(source)], "ts": _at(source.begin, origin)}
        end = {"pid": target.rank, "tid": threads[id(target)], "ts": _at(max(source.begin, target.begin), origin)}
        events += [{"ph": "s", **common, **start}, {"ph": "f", "bp": "e", **common, **end}]
    about = {"begin": origin, "clock uncertainty in seconds": uncertainty}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _threads(spans: Sequence[Span]) -> tuple[dict[int, int], list[str]]:
    """Return the thread of each span, by its id(), and the names of threads: calls of one thread may not overlap."""
    numbers: dict[tuple[str, int], int] = {}
    threads: dict[int, int] = {}
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in spans:
        busy = ends[span.rank, span.group]
        free = next((number for number, end in enumerate(busy) if end + _GAP <= span.begin), len(busy))
        if span.call["op"] == STEP:
            free = 0
        else:
            busy[free : free + 1] = [span.end]
        threads[id(span)] = numbers.setdefault((span.group, free), len(numbers))
    return threads, [group if not number else f"{group} ({number + 1})" for group, number in numbers]


def _at(seconds: float, origin: float) -> float:
    return round((seconds - origin) * _MICROSECONDS, 3)


def collectives_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the collectives that more than one rank has begun: the span of each rank."""
    by_call: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.call["peer"] is None and span.call["seq"] > 0:
            by_call[span.call["group"], span.call["seq"]].append(span)
    return [ranks for ranks in by_call.values() if len(ranks) > 1]


def _late_arrivals(spans: Sequence[Span]) -> Iterator[tuple[Span, Span, str]]:
    """Yield, for each collective, the rank that came last, and each rank that it made wait."""
    for ranks in collectives_of(spans):
        last = max(ranks, key=lambda span: span.begin)
        for span in ranks:
            if span is not last and span.end > last.begin:
                yield last, span, "waits"


def _messages(spans: Sequence[Span], uncertainty: float) -> Iterator[tuple[Span, Span, str]]:
    """Yield each message's send and receive: of one tag between two ranks, each receive takes the next send."""
    sent: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for span in spans:
        if span.call["op"] == "send":
            sent[span.call["group"], span.rank, span.call["peer"], span.call["tag"]].append(span)
    for span in reversed(spans):  # the latest first: the first ones of either side may not be kept
        if span.call["op"] == "recv" and span.ended and not span.call["error"]:
            key = span.call["group"], span.call["peer"], span.rank, span.call["tag"]
            before = [send for send in sent[key] if send.begin <= span.end + uncertainty]
            if before:
                sent[key].remove(before[-1])
                if before[-1].begin <= span.end:  # by clocks that differ it may have come before, as no arrow can
                    yield before[-1], span, "message"
