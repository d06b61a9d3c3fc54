"""The arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest

from rankmesh_agent.collectives.reduce import combine, refuse
from rankmesh_agent.wire.ops import ReduceOp


def test_half_precision_is_accumulated_in_single_precision_and_rounded_once():
    parts = [np.array([2048.0], np.float16), *[np.array([1.0], np.float16)] * 4]
    out = np.empty(1, np.float16)
    combine(ReduceOp.SUM, parts, out)
    assert out[0] == 2052  # in float16, 2048 + 1 is 2048


def test_half_precision_over_many_pieces():
    rng = np.random.default_rng(1)
    parts = [rng.normal(size=100_000).astype(np.float16) for _ in range(3)]
    out = np.empty(100_000, np.float16)
    combine(ReduceOp.SUM, parts, out)
    want = (parts[0].astype(np.float32) + parts[1].astype(np.float32) + parts[2].astype(np.float32)).astype(np.float16)
    assert out.tobytes() == want.tobytes()


def test_the_first_part_may_be_the_output():
    out = np.array([1, 2])
    combine(ReduceOp.PRODUCT, [out, np.array([3, 4]), np.array([5, 6])], out)
    assert out.tolist() == [15, 48]


def test_one_part_is_copied():
    out = np.zeros(2)
    combine(ReduceOp.MIN, [np.array([1.0, 2.0])], out)
    assert out.tolist() == [1, 2]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_complex_numbers_have_no_order(op):
    with pytest.raises(TypeError, match=f"ReduceOp.{op.name} is not defined for complex64"):
        refuse(op, np.dtype(np.complex64))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_complex_numbers_can_be_added_and_multiplied(op):
    refuse(op, np.dtype(np.complex128))
