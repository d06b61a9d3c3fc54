"""Ranks that make the others wait, by the begins and ends of all ranks' calls, and why. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from statistics import median

from rankmesh_agent.wire.schemas import ResourceUsage
from rankmesh_agent.wire.snapshot import RankWaits
from rankmesh_gateway.schemas import RankDetails, Straggler
from rankmesh_gateway.stragglers.spans import STEP, Span, collectives_of, since, spans_of, uncertainty_of

MIN_LOST = 0.03
"""Share of the time that the others lose by a rank, the longest wait left out, from which on it is a straggler."""
_MORE = 3.0
"""Least ratio of a straggler's loss to the loss by another rank: all ranks of a busy host come late now and then."""
_LATELY = 0.1
"""Part of the time in which ranks may have come to be late, too few times for the share of all of it."""
_MIN_CALLS = 5
_CORE_WAIT = 0.1
_FAULTS = 20.0
_MIN_WAITS = 0.1
"""Share of the time that both ends of a slow link wait for the other: of some 200 moments."""
_LESS = 1 / 3
_DIRECT = 3
"""Ranks of a world that use all links; in a larger one, a link on which no rank waits may be unused."""
_BUSY = 0.7
_MORE_CPU = 0.1


def find_stragglers(
    details: Sequence[RankDetails], usage: Mapping[int, ResourceUsage], seconds: float
) -> list[Straggler]:
    """Return the ranks of a job that make the others wait.

    Only the calls of the last seconds count; if no rank is late in them, those of their last tenth.
    """
    hosts, places = {each.rank: each.host for each in details}, {each.rank: each.place for each in details}
    spans, uncertainty = spans_of(details), uncertainty_of(details)
    found = late_ranks(since(spans, seconds, None), usage, hosts, uncertainty)
    if not found:
        lately = since(spans, seconds * _LATELY, None)
        found = late_ranks(lately, usage, hosts, uncertainty, 2 * MIN_LOST)  # of few calls, chance is a larger part
    for each in found:
        each.job, each.place = details[0].job, places[each.ranks[0]]
    return found


def late_ranks(
    spans: Sequence[Span],
    usage: Mapping[int, ResourceUsage],
    hosts: Mapping[int, str],
    uncertainty: float,
    least: float = MIN_LOST,
) -> list[Straggler]:
    """Return the ranks that make the others wait, the worst first; if there are none, the host whose ranks do."""
    found = _late(spans, usage, {rank: [rank] for rank in hosts}, uncertainty, least)
    if found or len({*hosts.values()}) < 2:
        return found
    units = {rank: [each for each in hosts if hosts[each] == hosts[rank]] for rank in hosts}
    return _late(spans, usage, units, uncertainty, least)


def slow_links(job: str, waits: Mapping[int, RankWaits], usage: Mapping[int, ResourceUsage]) -> list[Straggler]:
    """Return the ranks between which the network is slow, where no rank comes late.

    The two ends of a slow link wait for each other in the same calls, for much longer than the ends of another link; so
    a world of two ranks, which has one link, has no slow one. On a busy host the ends must wait for longer: a rank that
    waits for a core does not read the bytes that have come.
    """
    waited = ((rank, int(other)) for rank, each in waits.items() for other in each.shares)
    either = {(min(pair), max(pair)) for pair in waited}
    if len(waits) <= _DIRECT:
        either = {*combinations(sorted(waits), 2)}
    both = {pair: _both_wait(waits, *pair) for pair in either}
    worst = max(both.values(), default=0.0)
    slow = [{*pair} for pair, share in both.items() if share >= worst * _LESS]
    busy = max((each.core_wait for each in usage.values()), default=0.0)
    if worst < _MIN_WAITS + busy / 2 or len(slow) == len(both):
        return []
    ranks = sorted({*slow[0]}.intersection(*slow) or {*slow[0]}.union(*slow))
    what = "has a slow network" if len(ranks) == 1 else "have a slow network between them"
    why = f"{what}: in calls that all have begun, the others wait for its bytes; 'rankmesh doctor' measures it"
    return [Straggler(job, ranks, worst, 0, 0, 0.0, 0.0, why)]


def _both_wait(waits: Mapping[int, RankWaits], rank: int, other: int) -> float:
    """Return the share of the time that two ranks wait for each other in the same calls."""
    ends = [waits[a].shares.get(str(b), {}) if a in waits else {} for a, b in ((rank, other), (other, rank))]
    return sum(min(share, ends[1].get(call, 0.0)) for call, share in ends[0].items())


def _late(
    spans: Sequence[Span],
    usage: Mapping[int, ResourceUsage],
    units: Mapping[int, list[int]],
    uncertainty: float,
    least: float,
) -> list[Straggler]:
    """Return the ranks, or units of several, that the ranks of other units wait for."""
    calls = [sorted(ranks, key=lambda span: span.begin) for ranks in collectives_of(spans)]
    if len(calls) < _MIN_CALLS:
        return []
    lasts: dict[int, list[tuple[float, float]]] = {unit[0]: [] for unit in units.values()}
    for ranks in calls:
        unit = units[ranks[-1].rank]
        others = [span for span in ranks if span.rank not in unit]
        late = ranks[-1].begin - others[-1].begin if others else 0.0
        if late > uncertainty:
            lasts[unit[0]].append((ranks[-1].begin, late))
    end = max(span.end for ranks in calls for span in ranks)
    seconds = end - min(ranks[0].begin for ranks in calls)
    found = []
    losses = {first: sum(late for _, late in times) for first, times in lasts.items()}
    for first, times in lasts.items():
        lost, (_, usual) = losses[first], _compared(losses, [first])
        longest = max((late for _, late in times), default=0.0)
        if lost - longest >= least * seconds and lost >= _MORE * usual:
            begun = next(at for at, late in times if late >= lost / len(times) / 2)
            late, why = median(late for _, late in times), _why(units[first], spans, usage, lost / len(calls))
            found.append(Straggler("", units[first], lost / seconds, len(times), len(calls), late, end - begun, why))
    return sorted(found, key=lambda each: -each.lost)


def _why(ranks: Sequence[int], spans: Sequence[Span], usage: Mapping[int, ResourceUsage], late: float) -> str:
    """Return what ranks do while the others wait for them, by the mean of the seconds by which they come late."""
    between, usual = _compared(_between(spans), ranks)
    text = f"{between * 1e3:.3g} ms between two calls, where the others need {usual * 1e3:.3g} ms"
    taken = _taken(ranks, usage)
    if not taken and between - usual < late / 2:
        return f"ends its calls later than the others: its network is slower ({text})"
    return taken or ": ".join(filter(None, (activity(ranks, usage), text)))


def activity(ranks: Collection[int], usage: Mapping[int, ResourceUsage]) -> str:
    """Return what ranks do, by their use of resources and that of the others; empty if it is not known."""
    if not usage.keys() & {*ranks}:
        return ""
    cpu, usual = _compared({rank: each.cpu for rank, each in usage.items()}, ranks)
    more = cpu >= _BUSY or cpu - usual >= _MORE_CPU
    does = "computes" if more else "waits, for data perhaps, and does not compute"
    return _taken(ranks, usage) or f"{does} ({cpu:.0%} of a core)"


def _taken(ranks: Collection[int], usage: Mapping[int, ResourceUsage]) -> str:
    """Return which resource of their host ranks lack; empty if they lack none."""
    wait, usual_wait = _compared({rank: each.core_wait for rank, each in usage.items()}, ranks)
    faults, usual_faults = _compared({rank: each.faults for rank, each in usage.items()}, ranks)
    if wait >= max(_CORE_WAIT, 2 * usual_wait):
        return f"waits for a core {wait:.0%} of the time: other programs run on its host"
    if faults >= max(_FAULTS, 2 * usual_faults):
        return f"has memory on the disk, and reads {faults:.0f} pages a second: the host swaps"
    return ""


def _compared(values: Mapping[int, float], ranks: Collection[int]) -> tuple[float, float]:
    """Return the median of ranks, and that of the others."""
    these = [value for rank, value in values.items() if rank in ranks]
    others = [value for rank, value in values.items() if rank not in ranks]
    return median(these or [0.0]), median(others or [0.0])


def _between(spans: Sequence[Span]) -> dict[int, float]:
    """Return, for each rank, the mean of the seconds between the end of a call and the begin of the next one."""
    ends: dict[int, float] = {}
    gaps: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.call.op != STEP:
            if span.rank in ends:
                gaps[span.rank].append(max(0.0, span.begin - ends[span.rank]))
            ends[span.rank] = max(span.end, ends.get(span.rank, span.end))
    return {rank: sum(each) / len(each) if each else 0.0 for rank, each in gaps.items()}
