"""The arithmetic alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.oracle import OPS, expected, ops_of, values

from rankmesh_agent.collectives.reduction import (
    check_op,
    combine,
    combine_partials,
    combine_to_partial,
    partial_dtype,
    premultiplied,
)
from rankmesh_agent.wire.dtypes import COMPLEX32, FROM_CODE, FROM_NAME, display
from rankmesh_agent.wire.ops import ReduceOp


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), FROM_NAME["bfloat16"], COMPLEX32], ids=display)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], ids=lambda op: op.name)
def test_half_precision_over_many_pieces(op, dtype, members):
    if op is not ReduceOp.SUM and dtype == COMPLEX32:
        return  # NumPy's complex division gives some zeros another sign
    rng = np.random.default_rng(members)
    parts = []
    for _ in range(members):
        wide = (rng.normal(size=200_000) * 2.0 ** rng.integers(-24, 12, 200_000)).astype(np.float32)
        parts.append(wide.astype(np.float16).view(dtype) if dtype == COMPLEX32 else wide.astype(dtype))
    out = np.empty(parts[0].size, dtype)
    combine(op, parts, out)
    assert out.tobytes() == expected(op, parts).tobytes()


def test_operations_are_refused_exactly_where_they_make_no_sense():
    for op, dtype in itertools.product(OPS, FROM_CODE.values()):
        if op in ops_of(dtype):
            check_op(op, dtype)
        else:
            with pytest.raises(TypeError, match=f"ReduceOp.{op.name} is not defined for {display(dtype)}"):
                check_op(op, dtype)


def test_an_average_of_integers_is_exact_and_rounds_towards_zero():
    out = np.empty(3, np.int8)
    combine(ReduceOp.AVG, [np.array([127, -128, -1], np.int8), np.array([127, -128, 0], np.int8)], out)
    assert out.tolist() == [127, -128, 0]


# PREMUL_SUM


def test_premul_sum_without_a_factor_says_how_to_give_one():
    with pytest.raises(TypeError, match=r"PREMUL_SUM\(0.5\)"):
        check_op(ReduceOp.PREMUL_SUM, np.dtype(np.float32))


@pytest.mark.parametrize(
    ("factor", "dtype"), [(2, np.int32), (0.5, np.float32), (2, np.float16), (1j, np.complex64), (0.5, np.complex128)]
)
def test_factors_that_fit_are_accepted(factor, dtype):
    check_op(ReduceOp.PREMUL_SUM(factor), np.dtype(dtype))
    assert premultiplied(factor, np.array([2, 4], dtype)).tolist() == [2 * factor, 4 * factor]


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [
        (0.5, np.int32),
        (2.0, np.int32),
        (300, np.uint8),
        (-1, np.uint16),
        (1 << 31, np.int32),
        (1j, np.float32),
        (2 + 0j, np.float32),
        (np.complex64(1), np.float32),
        ("2", np.float32),
        (None, np.float32),
        (np.array([2.0, 3.0]), np.float32),
        ([2.0], np.float32),
        (1, bool),
    ],
    ids=repr,
)
def test_factors_that_do_not_fit_are_refused(factor, dtype):
    with pytest.raises(TypeError, match="PREMUL_SUM"):
        check_op(ReduceOp.PREMUL_SUM(factor), np.dtype(dtype))


# In two stages


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_partial_results_lose_nothing(op):
    for dtype in FROM_CODE.values():
        if op in ops_of(dtype):
            check_partial_results(op, dtype)


def check_partial_results(op, dtype):
    parts = [values(rank, 40_000, dtype) for rank in range(5)]
    wide = partial_dtype(op, dtype, 5)
    partials = [np.empty(40_000, wide) for _ in range(2)]
    combine_to_partial(op, parts[:4], partials[0])
    combine_to_partial(op, parts[4:], partials[1])
    got, want = np.empty(40_000, dtype), np.empty(40_000, dtype)
    combine_partials(op, partials, 5, got)
    combine(op, parts, want)  # the same order of additions, as the last part is alone in its half
    if dtype.char not in "gG":  # x87 numbers have padding, whose bits mean nothing
        got, want = got.view(np.uint8), want.view(np.uint8)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op", "dtype", "members", "wide"),
    [
        (ReduceOp.SUM, np.float16, 4, np.float32),
        (ReduceOp.MAX, np.float16, 4, np.float16),
        (ReduceOp.SUM, np.int8, 4, np.int8),
        (ReduceOp.AVG, np.int8, 256, np.int16),
        (ReduceOp.AVG, np.uint8, 257, np.uint32),
        (ReduceOp.AVG, np.int32, 2, np.int64),
        (ReduceOp.AVG, np.uint64, 9, np.uint64),
        (ReduceOp.AVG, np.float64, 9, np.float64),
    ],
)
def test_partial_results_are_no_wider_than_they_have_to_be(op, dtype, members, wide):
    assert partial_dtype(op, np.dtype(dtype), members) == wide


def test_averages_of_extremes_survive_two_stages():
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32):
        limits = np.iinfo(dtype)
        parts = [np.array([limits.max, limits.min, limits.max - rank % 2], dtype) for rank in range(6)]
        partials = [np.empty(3, partial_dtype(ReduceOp.AVG, np.dtype(dtype), 6)) for _ in range(2)]
        combine_to_partial(ReduceOp.AVG, parts[:3], partials[0])
        combine_to_partial(ReduceOp.AVG, parts[3:], partials[1])
        got, want = np.empty(3, dtype), np.empty(3, dtype)
        combine_partials(ReduceOp.AVG, partials, 6, got)
        combine(ReduceOp.AVG, parts, want)
        assert got.tolist() == want.tolist() == [limits.max, limits.min, want[2]]
