"""History of the last minutes: the rates of the jobs' groups, the calls that were held up, and the slow ranks."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from rankmesh_agent.wire.schemas import RankGroupInfo
from rankmesh_gateway.schemas import RateSample, TotalRates
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.groups import merged_calls, merged_groups

SAMPLE_SECONDS = 2.0
"""Minimum interval of the samples."""
HISTORY_SECONDS = 300.0
"""Age up to which samples are kept."""
_MAX_LOAD = 0.01
"""Share of a core that sampling may take; for many ranks, the interval grows."""


class History:
    """Samples of the rates, the scores of ranks, and held-up calls and slow ranks in the event log."""

    def __init__(self, writer: EventWriter, processor_clock: Callable[[], float] = time.thread_time) -> None:
        self._writer = writer
        self._processor_clock = processor_clock
        self._samples: deque[tuple[float, dict[str, TotalRates]]] = deque(maxlen=int(HISTORY_SECONDS / SAMPLE_SECONDS))
        self._due = float("-inf")

    def observe(self, epochs: Sequence[Epoch], now: float) -> None:
        """Take a sample, unless the last one is recent."""
        if now < self._due:
            return
        began = self._processor_clock()
        live = [epoch for epoch in epochs if epoch.live_ranks() or epoch.logged_calls]
        groups: dict[str, list[RankGroupInfo]] = defaultdict(list)
        for epoch in live:
            groups[epoch.job] += merged_groups(epoch, now)
        self._samples.append((now, {job: total_rates(found) for job, found in groups.items()}))
        for epoch in live:
            self._writer.held_up_calls(epoch, merged_calls(epoch, now) if epoch.live_ranks() else [], now)
            heard = {rank: each.sample() for rank, each in epoch.records.items() if each.is_live() and each.reported_at}
            epoch.scores.observe(heard, now)
            self._writer.slow_ranks(epoch, now)
        self._due = now + max(SAMPLE_SECONDS, (self._processor_clock() - began) / _MAX_LOAD)

    def samples(self, now: float, job: str | None = None) -> list[RateSample]:
        """Return the samples of one job, or of all together, the oldest first."""
        found = []
        for at, sample in self._samples:
            if now - at <= HISTORY_SECONDS:
                rates = [each for name, each in sample.items() if job in (None, name)]
                found.append(
                    RateSample(now - at, sum(each.operations for each in rates), sum(each.bytes for each in rates))
                )
        return found


def total_rates(groups: Sequence[RankGroupInfo]) -> TotalRates:
    """Return the rates of groups together."""
    return TotalRates(sum(each.operations_rate for each in groups), sum(each.bytes_rate for each in groups))
