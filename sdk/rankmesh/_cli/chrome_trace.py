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


def chrome_trace(details: Sequence[RankDetails], spans: Sequence[Span]) -> dict[str, Any]:
    """Return the document: a process for each rank, a thread for each group, arrows from late ranks and senders."""
    origin = min((span.begin for span in spans), default=0.0)
    threads: dict[str, int] = {}
    for span in spans:
        threads.setdefault(span.group, len(threads))
    events: list[dict[str, Any]] = []
    for each in details:
        name = f"rank {each.rank} ({each.host}, pid {each.pid})"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}})
        for group, thread in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": each.rank, "tid": thread, "args": {"name": group}})
    uncertainty = uncertainty_of(details)
    arrows = [*_late_arrivals(spans), *_messages(spans, uncertainty)]
    waited = {id(awaiting): source for source, awaiting, kind in arrows if kind == "waits"}
    for span in spans:
        place = {"pid": span.rank, "tid": threads[span.group], "ts": _at(span.begin, origin)}
        if span.call.op == STEP:
            events.append({"ph": "i", "s": "p", "name": span.call.call, **place})
            continue
        arguments = {"call": span.call.call, "bytes": span.call.nbytes, "number": span.call.seq}
        if span.call.error:
            arguments["error"] = span.call.error
        if not span.ended:
            arguments["state"] = "under way"
        if id(span) in waited:
            late = waited[id(span)]
            arguments |= {"waited for": f"rank {late.rank}", "waited": f"{(late.begin - span.begin) * 1e3:.3f} ms"}
        duration = (span.end - span.begin) * _MICROSECONDS
        events.append({"ph": "X", "name": span.call.op, "cat": "rankmesh", "dur": duration, "args": arguments, **place})
    for number, (source, target, kind) in enumerate(arrows):
        common = {"cat": kind, "name": kind, "id": number}
        start = {"pid": source.rank, "tid": threads[source.group], "ts": _at(source.begin, origin)}
        end = {"pid": target.rank, "tid": threads[target.group], "ts": _at(max(source.begin, target.begin), origin)}
        events += [{"ph": "s", **common, **start}, {"ph": "f", "bp": "e", **common, **end}]
    about = {"begin": origin, "clock uncertainty in seconds": uncertainty}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _at(seconds: float, origin: float) -> float:
    return (seconds - origin) * _MICROSECONDS


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
                yield before[-1], span, "message"
