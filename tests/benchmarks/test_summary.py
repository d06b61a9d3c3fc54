"""The statistics."""

from __future__ import annotations

import random

from benchmarks.summary import Summary, summarize


def test_of_known_numbers() -> None:
    timings = [float(number) for number in range(1, 102)]
    random.Random(1).shuffle(timings)
    assert summarize(timings) == Summary(median=51, least=1, lower=26, upper=76)


def test_one_disturbed_timing_moves_neither_median_nor_spread_far() -> None:
    assert summarize([10, 10, 10, 10, 5000]) == Summary(10, 10, 10, 10)


def test_of_a_single_timing() -> None:
    assert summarize([7]) == Summary(7, 7, 7, 7)
