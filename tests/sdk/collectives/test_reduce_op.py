"""Which reductions the functions take: ours, torch's, the deprecated names."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import rankmesh as dist
from rankmesh._collectives.reduce_op import reduction
from rankmesh_agent.wire.ops import PremulSum

Op = dist.ReduceOp
F4, F8, I4, C8 = np.dtype("f4"), np.dtype("f8"), np.dtype("i4"), np.dtype("c8")


class _Torchs:
    """Something of the module that torch's ReduceOp is in."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


_Torchs.__module__ = "torch.distributed.distributed_c10d"


@pytest.mark.parametrize("op", ["SUM", 0, 8, None, True, np.add, sum, _Torchs(), _Torchs(name="SUMM"), _Torchs(op=0)])
def test_what_is_no_operation_is_refused(op: Any) -> None:
    with pytest.raises(TypeError, match=r"op must be a rankmesh\.ReduceOp, got"):
        reduction(op, F8)


def test_torchs_operations_are_taken() -> None:
    for op in (Op.SUM, Op.AVG, Op.MIN):
        member = _Torchs(name=op.name)  # ReduceOp.SUM there
        assert reduction(member, F8).op is op
        assert reduction(_Torchs(op=member), F8).op is op  # ReduceOp(ReduceOp.SUM)


def test_something_elses_operations_are_not() -> None:
    class Foreign:
        name = "SUM"

    with pytest.raises(TypeError, match="op must be"):
        reduction(Foreign(), F8)


# PREMUL_SUM


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(0.5, F4), (2, F8), (np.float64(0.25), F4), (-3, I4), (np.int64(3), I4), (0.5, C8), (1j, C8), (True, I4)],
)
def test_premul_sum_takes_a_factor_that_fits(factor: Any, dtype: np.dtype[Any]) -> None:
    assert reduction(Op.PREMUL_SUM(factor), dtype) == (Op.PREMUL_SUM, factor)


def test_equal_factors_of_different_types_are_told_apart() -> None:
    assert reduction(Op.PREMUL_SUM(2), I4).factor == 2
    with pytest.raises(TypeError, match="factor of type int"):
        reduction(Op.PREMUL_SUM(2.0), I4)
    assert reduction(Op.PREMUL_SUM(3.0), F4).factor == 3
    with pytest.raises(TypeError, match="real factor"):
        reduction(Op.PREMUL_SUM(3 + 0j), F4)


@pytest.mark.parametrize("factor", [2, 0.5, np.float32(0.5), np.array(4.0), np.array([4])])
def test_torchs_maker_of_premul_sums(factor: Any) -> None:
    made = dist._make_nccl_premul_sum(factor)
    assert isinstance(made, PremulSum)
    assert made.factor == np.asarray(factor).item()


# Names


def test_which_support_complex_numbers() -> None:
    assert {op for op in Op if dist.supports_complex(op)} == {Op.SUM, Op.AVG, Op.PRODUCT, Op.PREMUL_SUM}
    assert dist.supports_complex(Op.PREMUL_SUM(0.5))


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_the_deprecated_names_warn_where_they_are_used(name: str) -> None:
    with pytest.warns(FutureWarning, match=r"rankmesh\.reduce_op is deprecated; use rankmesh\.ReduceOp") as warned:
        assert getattr(dist.reduce_op, name) is Op[name]
    assert warned[0].filename == __file__


def test_the_deprecated_names_are_those_of_reduce_op() -> None:
    assert set(Op.__members__) <= set(dir(dist.reduce_op))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="reduce_op has no 'SUMM'; it has SUM"):
            _ = dist.reduce_op.SUMM
        assert not hasattr(dist.reduce_op, "summ")
