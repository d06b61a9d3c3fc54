"""Contents by which results are known."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from benchmarks.patterns import fill, wrong

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("count", [1, 6, 100_000])
def test_what_was_filled_is_right(count: int, dtype: np.dtype) -> None:
    array = np.empty(count, dtype)
    fill(array, 36)  # the sum of eight ranks' numbers
    assert wrong(array, 36) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_the_sum_of_eight_patterns_is_exact(dtype: np.dtype) -> None:
    parts = np.empty((8, 20), dtype)
    for rank, part in enumerate(parts):
        fill(part, rank + 1)
    assert wrong(parts.astype(np.float64).sum(axis=0).astype(dtype), 36) is None


def test_every_element_is_looked_at() -> None:
    array = np.empty(100_000, np.float32)
    fill(array, 2)
    array[77_777] = 5
    assert wrong(array, 2) == f"element 77777 of 100000 is 5.0, not {2 * (1 + 77_777 % 7)}.0"


@pytest.mark.parametrize("shift", [1, 2, 1024, 16384])
def test_a_piece_in_the_wrong_place_is_seen(shift: int) -> None:
    array = np.empty(100_000, np.float32)
    fill(array, 2)
    assert wrong(np.roll(array, shift), 2) is not None
