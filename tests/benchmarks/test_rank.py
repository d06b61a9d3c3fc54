"""The timing loop, with worlds that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.operations import OPERATIONS
from benchmarks.rank import timings
from benchmarks.worlds import Call


class MadeUp:
    """Three equal ranks, of which we are rank 1; with a factor of 3, its sums are right (1 + 2 + 3 is 3 times 2)."""

    rank, size, version = 1, 3, "Made up 1.0"
    empty = staticmethod(np.empty)

    def __init__(self, factor: float, spoil_call: int = -1) -> None:
        self._factor, self._spoil_call, self.calls = factor, spoil_call, 0

    def barrier(self) -> Call:
        return lambda: None

    def all_reduce(self, array: np.ndarray) -> Call:
        def call() -> None:
            array[:] *= self._factor
            if array.size > 1:
                self.calls += 1
                array[-1] += self.calls == self._spoil_call

        return call


def test_one_timing_a_repetition() -> None:
    seconds = timings(MadeUp(3), "all_reduce", nbytes=400, calls=5, repetitions=4)
    assert len(seconds) == 4
    assert min(seconds) > 0


def test_wrong_results_are_not_timed() -> None:
    with pytest.raises(ArithmeticError, match=r"all_reduce, rank 1 of 3: .*element 0 of 100 is 4\.0, not 6"):
        timings(MadeUp(2), "all_reduce", nbytes=400, calls=1, repetitions=1)


def test_results_are_checked_after_the_timings_too() -> None:
    world = MadeUp(3, spoil_call=7)  # one check, five calls, and the last check
    with pytest.raises(ArithmeticError, match="element 99 of 100"):
        timings(world, "all_reduce", nbytes=400, calls=5, repetitions=1)
    assert world.calls == 7


def test_there_is_at_least_one_element() -> None:
    assert OPERATIONS["all_reduce"].for_bytes(MadeUp(3), 1).inputs[0][0].size == 1
