"""A whole run: operations, training steps, joins and idle ranks, arrays on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks import ddp, join, rounds
from benchmarks import gpu as gpus
from benchmarks.cases import Case, Effort
from benchmarks.implementations import Implementation, available
from benchmarks.machine import describe
from benchmarks.results import Results, Run
from benchmarks.workers import MeasurementError


@dataclass(frozen=True)
class Session:
    """Cases with their effort; rounds of joins (and idle ranks), of training steps, and of arrays on GPUs."""

    cases: Sequence[Case]
    effort: Callable[[Case], Effort]
    joins: int = 0
    ddp: int = 0
    gpu: int = 0
    gpu_ranks: Sequence[int] = gpus.RANKS
    gpu_sizes: Sequence[int] = gpus.SIZES

    def measure(self, wanted: Sequence[Implementation]) -> Run:
        """Measure all of it; raises MeasurementError."""
        began, clock, machine, results = datetime.now(UTC), time.monotonic(), describe(), Results()
        here, left_out = available(wanted if self.cases else ())
        here_ddp, no_ddp = available(ddp.IMPLEMENTATIONS if self.ddp else ())
        left_out += no_ddp
        if self.cases and not here:
            raise MeasurementError(f"No implementation can be measured here. {' '.join(left_out)}")
        if self.cases:
            rounds.measure(here, self.cases, self.effort, results)
        if here_ddp:
            ddp.measure(here_ddp, self.ddp, results)
        if self.gpu:
            left_out += gpus.measure(self.gpu, self.gpu_ranks, self.gpu_sizes, results)
        if self.joins:
            join.measure(self.joins, results)
        for line in left_out:
            rounds.progress(line)
        return Run(results, machine, began, (time.monotonic() - clock) / 60, left_out)
