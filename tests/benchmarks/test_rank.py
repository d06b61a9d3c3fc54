"""The timing loop, with a world that is made up."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rank import check, timings
from benchmarks.worlds import Call, World


def world_of(factor: float) -> World:
    """Return a world of three ranks, of which we are rank 1; with a factor of 3, its sums are right."""

    def all_reduce(array: np.ndarray) -> Call:
        def call() -> None:
            array[:] *= factor

        return call

    return World(1, 3, "Made up 1.0", all_reduce, lambda: None)


def test_one_timing_a_repetition() -> None:
    seconds = timings(world_of(3), nbytes=400, calls=5, repetitions=4)  # rank 1 has 2, and 1 + 2 + 3 = 2 * 3
    assert len(seconds) == 4
    assert min(seconds) > 0


def test_wrong_sums_are_not_timed() -> None:
    with pytest.raises(ArithmeticError, match=r"rank 1 of 3: 100 of 100 sums are wrong; element 0 is 4\.0, not 6"):
        timings(world_of(2), nbytes=400, calls=1, repetitions=1)


def test_every_element_is_checked() -> None:
    array = np.empty(1000, np.float32)

    def all_but_one() -> None:
        array[:] = 6
        array[777] = 5

    with pytest.raises(ArithmeticError, match=r"1 of 1000 sums are wrong; element 777 is 5\.0"):
        check(world_of(3), array, all_but_one)
