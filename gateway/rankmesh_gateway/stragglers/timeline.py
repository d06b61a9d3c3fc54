"""Timeline of a job: the ranks' waits for each other, and a table by operation. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from rankmesh_gateway.schemas import OperationTimes, RankDetails, Timeline
from rankmesh_gateway.stragglers.spans import STEP, Span, spans_of, store_waits_of

SLICES = 120
"""Parts of the time of a timeline."""
_MAX_OPERATIONS = 50


def timeline_of(details: Sequence[RankDetails], seconds: float) -> Timeline:
    """Return the timeline of a job.

    Args:
        details: the ranks that answer, with the calls that their flight recorders keep.
        seconds: the time; less, if the flight recorder of a rank does not reach as far back.
    """
    spans = [span for span in spans_of(details) if span.call.op != STEP]
    firsts = {span.rank: span.begin for span in reversed(spans)}
    stored = store_waits_of(details)
    end = max((span.end for span in [*spans, *stored]), default=0.0)
    begin = max([end - seconds, *firsts.values()]) if firsts else end - seconds
    sizes = {group.name: len(group.ranks) for each in details if each.snapshot for group in each.snapshot.groups}
    calls, operations = defaultdict[tuple[str, int], list[Span]](list), defaultdict[tuple[str, str], list[Span]](list)
    waits = [(span, span.end) for span in stored]
    for span in spans:
        if span.end > begin:
            operations[span.group, span.call.call].append(span)
            if span.call.peer is None and span.call.seq > 0:
                calls[span.group, span.call.seq].append(span)
            elif span.call.op.startswith("recv"):
                waits.append((span, span.end))
    last = defaultdict[tuple[str, str, int], float](float)
    for (group, _), ranks in calls.items():
        latest = max(ranks, key=lambda span: span.begin)
        everyone = len(ranks) >= sizes.get(group, 0) or any(span.ended for span in ranks)
        waits += [(span, min(span.end, latest.begin if everyone else math.inf)) for span in ranks]
        if len(ranks) > 1:
            before = sorted(span.begin for span in ranks)[-2]
            last[group, latest.call.call, latest.rank] += latest.begin - before
    found = {each.rank: [0.0] * SLICES for each in details}
    for span, until in waits:
        _add(found[span.rank], span.begin - begin, until - begin, end - begin)
    rows = [_times(group, call, ranks, last) for (group, call), ranks in operations.items()]
    rows.sort(key=lambda row: -row.seconds * row.calls)
    return Timeline(details[0].job, end - begin, found, rows[:_MAX_OPERATIONS])


def _times(group: str, call: str, spans: Sequence[Span], last: Mapping[tuple[str, str, int], float]) -> OperationTimes:
    ranks = {span.rank for span in spans}
    late = {rank: last.get((group, call, rank), 0.0) for rank in ranks}
    slowest = max(late, key=late.__getitem__)
    calls, mean = round(len(spans) / len(ranks)), fmean(span.end - span.begin for span in spans)
    seconds = late[slowest]
    return OperationTimes(group, call, calls, mean, spans[0].call.nbytes, slowest if seconds else -1, seconds)


def _add(slices: list[float], begin: float, end: float, seconds: float) -> None:
    """Add the time from ``begin`` to ``end`` to the parts of a time of some seconds, each as a share of the part."""
    part = seconds / len(slices) or 1.0
    for place in range(max(0, int(begin / part)), min(len(slices), math.ceil(end / part))):
        common = min(end, (place + 1) * part) - max(begin, place * part)
        slices[place] = round(min(1.0, slices[place] + max(0.0, common) / part), 3)
