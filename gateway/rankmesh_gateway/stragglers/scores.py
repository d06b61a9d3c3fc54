"""Scores of the ranks of an epoch: the share of the time that the others wait for each, by what heartbeats have. Pure.

A rank that comes late to collectives spends less of its time in them than the others. Those that it makes late in other
groups spend as much of it in collectives altogether as the ranks that wait for them there, so they do not count.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rankmesh_agent.wire.schemas import ResourceUsage

WINDOW_SECONDS = 10.0
"""Time that a score is of. A rank is slow once its score has been SLOW for as long: one long call makes none slow."""
SLOW = 0.05
"""Score from which on a rank is slow; below half of it, it is no longer."""
_COUNTERS = "cpu", "core_wait", "faults"
_MIN_CALLS = 5
"""Calls of a group in that time, from which on they count."""


class HeartbeatSample(NamedTuple):
    """A rank at its last heartbeat: the clock, the use of resources, and by group the calls and the seconds in them."""

    at: float
    usage: ResourceUsage | None
    groups: Mapping[str, tuple[int, float]]


class RankScores:
    """Scores of the ranks of an epoch.

    Attributes:
        values: the scores, by rank.
        slow: the ranks that are slow, and the clock since when.
    """

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.slow: dict[int, float] = {}
        self._reports: dict[int, deque[HeartbeatSample]] = {}
        self._since: dict[int, float] = {}

    def observe(self, reports: Mapping[int, HeartbeatSample], now: float) -> None:
        """Record the last reports of the live ranks."""
        self._reports = {rank: self._reports.get(rank) or deque() for rank in reports}
        for rank, report in reports.items():
            kept = self._reports[rank]
            if not kept or report.at > kept[-1].at:
                kept.append(report)
            while len(kept) > 2 and now - kept[1].at >= WINDOW_SECONDS:
                kept.popleft()
        self.values = _scores({rank: _shares(kept) for rank, kept in self._reports.items()})
        late = {rank for rank, score in self.values.items() if score >= (SLOW / 2 if rank in self.slow else SLOW)}
        self._since = {rank: self._since.get(rank, now) for rank in late}
        self.slow = {rank: at for rank, at in self._since.items() if now - at > WINDOW_SECONDS}

    def usage(self) -> dict[int, ResourceUsage]:
        """Return what ranks use of their hosts in a second, as far as it is known."""
        found = {}
        for rank, kept in self._reports.items():
            known = [(report.at, report.usage) for report in kept if report.usage is not None]
            if len(known) > 1:
                (begin, first), (end, last) = known[0], known[-1]
                rates = {each: (getattr(last, each) - getattr(first, each)) / (end - begin) for each in _COUNTERS}
                found[rank] = replace(last, **{each: max(0.0, rate) for each, rate in rates.items()})
        return found


def _shares(reports: Sequence[HeartbeatSample]) -> dict[str, float]:
    """Return the shares of the time of its reports that a rank has spent in each group with enough calls."""
    shares, last = {}, reports[-1]
    for group, (calls, seconds) in last.groups.items():
        first = next(report for report in reports if group in report.groups)  # the first of all may be before the group
        calls_then, seconds_then = first.groups[group]
        if calls - calls_then >= _MIN_CALLS:
            shares[group] = (seconds - seconds_then) / (last.at - first.at)
    return shares


def _scores(shares: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Return the scores of ranks, by the shares of their time in each group."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, of_groups in shares.items():
        for group in of_groups:
            members[group].append(rank)
    total = {rank: sum(of_groups.values()) for rank, of_groups in shares.items()}
    scores = dict.fromkeys(shares, 0.0)
    for group, ranks in members.items():
        middle = len(ranks) // 2  # the median of the others than a rank that spends little time
        usual = sorted(shares[rank][group] for rank in ranks)[middle]
        altogether = sorted(total[rank] for rank in ranks)[middle]
        for rank in ranks:
            scores[rank] = max(scores[rank], min(usual - shares[rank][group], altogether - total[rank]))
    return scores
