"""The calls of all ranks as one trace in Chrome's format, which ui.perfetto.dev opens. Pure: no I/O, no clock.

Source of the format: the "Trace Event Format" document of Chrome's trace viewer; times are microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rankmesh_gateway.schemas import RankDetails
from rankmesh_gateway.stragglers.spans import STEP, Span, collectives_of, uncertainty_of

_MICROSECONDS = 1e6
_GAP = 2e-9
"""Seconds between two calls of one thread at least: viewers cut the microseconds of a begin to whole nanoseconds."""


def chrome_trace(details: Sequence[RankDetails], spans: Sequence[Span]) -> dict[str, Any]:
    """Return the document: a process for each rank, threads for each group, arrows from late ranks and senders."""
    origin = min((span.begin for span in spans), default=0.0)
    threads, names = _threads(spans)
    events: list[dict[str, Any]] = []
    for each in details:
        name = f"rank {each.rank} ({each.host}, pid {each.pid})"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}})
    for rank, thread in sorted({(span.rank, threads[id(span)]) for span in spans}):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": names[thread]}})
    uncertainty = uncertainty_of(details)
    arrows = [*_late_arrivals(spans), *_messages(spans, uncertainty)]
    waited = {id(awaiting): source for source, awaiting, kind in arrows if kind == "waits"}
    for span in spans:
        place = {"pid": span.rank, "tid": threads[id(span)], "ts": _at(span.begin, origin)}
        if span.call.op == STEP:
            events.append({"ph": "i", "s": "p", "name": span.call.call, **place})
            continue
        arguments = {"call": span.call.call, "bytes": span.call.nbytes, "number": span.call.seq}
        if span.call.algorithm:
            arguments["algorithm"] = span.call.algorithm
        if span.call.error:
            arguments["error"] = span.call.error
        if not span.ended:
            arguments["state"] = "under way"
        if id(span) in waited:
            late = waited[id(span)]
            arguments |= {"waited for": f"rank {late.rank}", "waited": f"{(late.begin - span.begin) * 1e3:.3f} ms"}
        duration = _at(span.end, span.begin)
        events.append({"ph": "X", "name": span.call.op, "cat": "rankmesh", "dur": duration, "args": arguments, **place})
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
        if span.call.op == STEP:
            free = 0
        else:
            busy[free : free + 1] = [span.end]
        threads[id(span)] = numbers.setdefault((span.group, free), len(numbers))
    return threads, [group if not number else f"{group} ({number + 1})" for group, number in numbers]


def _at(seconds: float, origin: float) -> float:
    return round((seconds - origin) * _MICROSECONDS, 3)


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
        if span.call.op == "send":
            sent[span.call.group, span.rank, span.call.peer, span.call.tag].append(span)
    for span in reversed(spans):  # the latest first: the first ones of either side may not be kept
        if span.call.op == "recv" and span.ended and not span.call.error:
            key = span.call.group, span.call.peer, span.rank, span.call.tag
            before = [send for send in sent[key] if send.begin <= span.end + uncertainty]
            if before:
                sent[key].remove(before[-1])
                if before[-1].begin <= span.end:  # by clocks that differ it may have come before, as no arrow can
                    yield before[-1], span, "message"
