"""Many timings in a few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """Of timings in microseconds a call.

    Attributes:
        median: half of them took longer.
        least: the shortest, what the machine can do when nothing disturbs.
        lower: a quarter took less.
        upper: a quarter took more. From lower to upper is the spread.
    """

    median: float
    least: float
    lower: float
    upper: float


def summarize(microseconds: Sequence[float]) -> Summary:
    """Return the summary of at least one timing."""
    if len(microseconds) == 1:
        return Summary(*microseconds * 4)
    lower, median, upper = statistics.quantiles(microseconds, n=4, method="inclusive")
    return Summary(median, min(microseconds), lower, upper)
