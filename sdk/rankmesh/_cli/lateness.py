"""Ranks that make the others wait, by the begins and ends of all ranks' calls, and why. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankmesh._cli.chrome_trace import Details, Span, collectives_of

MIN_LOST = 0.03
"""Share of the time that the others lose by a rank, from which on it is a straggler."""
_MIN_CALLS = 5
_CORE_WAIT = 0.1
_FAULTS = 20.0
_BUSY = 0.7


@dataclass
class ResourceUsage:
    """Resources of a process in an interval: processor time and waits for a core, in cores; page faults a second."""

    cpu: float
    core_wait: float
    faults: float


@dataclass
class Straggler:
    """A rank that makes the others wait, or all ranks of a host.

    Attributes:
        ranks: the ranks.
        lost: share of the time that the others wait for them and for no other rank.
        last, calls: how often they came last, by more than the clocks may be wrong, of how many collectives.
        late: median of the seconds by which they came last.
        since: seconds since that began.
        why: what they do meanwhile.
    """

    ranks: list[int]
    lost: float
    last: int
    calls: int
    late: float
    since: float
    why: str


def usage_of(before: Details, after: Details) -> ResourceUsage:
    """Return what a rank used between two snapshots of it."""
    first, second = before["snapshot"], after["snapshot"]
    seconds = max(1e-9, second["monotonic"] - first["monotonic"])
    names = "cpu_seconds", "core_wait_seconds", "major_faults"
    return ResourceUsage(*(max(0.0, second[name] - first[name]) / seconds for name in names))


def stragglers(
    spans: Sequence[Span], usage: Mapping[int, ResourceUsage], hosts: Mapping[int, str], uncertainty: float
) -> list[Straggler]:
    """Return the ranks that make the others wait, the worst first; if there are none, the host whose ranks do.

    Args:
        spans: the calls of all ranks, see ``spans_of``.
        usage: of each rank.
        hosts: of each rank.
        uncertainty: seconds by which the clocks of hosts may differ.
    """
    found = _late(spans, usage, {rank: [rank] for rank in usage}, uncertainty)
    if found or len({*hosts.values()}) < 2:
        return found
    return _late(
        spans, usage, {rank: [each for each in usage if hosts[each] == hosts[rank]] for rank in usage}, uncertainty
    )


def _late(
    spans: Sequence[Span], usage: Mapping[int, ResourceUsage], units: Mapping[int, list[int]], uncertainty: float
) -> list[Straggler]:
    """Return the ranks, or units of several, that the ranks of other units wait for."""
    calls = [sorted(ranks, key=lambda span: span.begin) for ranks in collectives_of(spans)]
    if len(calls) < _MIN_CALLS:
        return []
    lasts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for ranks in calls:
        unit = units[ranks[-1].rank]
        others = [span for span in ranks if span.rank not in unit]
        late = ranks[-1].begin - others[-1].begin if others else 0.0
        if late > uncertainty:
            lasts[unit[0]].append((ranks[-1].begin, late))
    end = max(span.end for ranks in calls for span in ranks)
    seconds = end - min(ranks[0].begin for ranks in calls)
    found = []
    for first, times in lasts.items():
        lost = sum(late for _, late in times)
        if lost >= MIN_LOST * seconds:
            begun = next(at for at, late in times if late >= lost / len(times) / 2)
            late, why = median(late for _, late in times), _why(units[first], spans, usage)
            found.append(Straggler(units[first], lost / seconds, len(times), len(calls), late, end - begun, why))
    return sorted(found, key=lambda each: -each.lost)


def _why(ranks: Sequence[int], spans: Sequence[Span], usage: Mapping[int, ResourceUsage]) -> str:
    """Return what ranks do while the others wait for them."""
    rest = [number for number in usage if number not in ranks]

    def compared(values: Mapping[int, float]) -> tuple[float, float]:
        return median(values.get(rank, 0.0) for rank in ranks), median(values.get(rank, 0.0) for rank in rest)

    wait, usual_wait = compared({rank: each.core_wait for rank, each in usage.items()})
    faults, usual_faults = compared({rank: each.faults for rank, each in usage.items()})
    cpu, _ = compared({rank: each.cpu for rank, each in usage.items()})
    between, usual = compared(_between(spans))
    if wait >= max(_CORE_WAIT, 2 * usual_wait):
        return f"waits for a core {wait:.0%} of the time: other programs run on its host"
    if faults >= max(_FAULTS, 2 * usual_faults):
        return f"has memory on the disk, and reads {faults:.0f} pages a second: the host swaps"
    text = f"{between * 1e3:.3g} ms between two calls, where the others need {usual * 1e3:.3g} ms"
    if between < 1.05 * usual:
        return f"ends its calls later than the others: its network is slower ({text})"
    what = "computes" if cpu >= _BUSY else "waits, for data perhaps, and does not compute"
    return f"{what} ({cpu:.0%} of a core): {text}"


def _between(spans: Sequence[Span]) -> dict[int, float]:
    """Return, for each rank, the mean of the seconds between the end of a call and the begin of the next one."""
    ends: dict[int, float] = {}
    gaps: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.call["op"] != "step":
            if span.rank in ends:
                gaps[span.rank].append(max(0.0, span.begin - ends[span.rank]))
            ends[span.rank] = max(span.end, ends.get(span.rank, span.end))
    return {rank: sum(each) / len(each) if each else 0.0 for rank, each in gaps.items()}
